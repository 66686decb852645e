"""Encoding, limits and conversion of the values that are stored (pure)."""
