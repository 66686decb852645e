"""Encode, limit and convert the values that are stored (pure)."""
