"""Remove what is older than the days that records are kept for."""
