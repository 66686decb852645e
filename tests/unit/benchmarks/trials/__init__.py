"""The benchmark of trials."""
