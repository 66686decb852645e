"""Recorded calls: forwarded, answered and captured."""
