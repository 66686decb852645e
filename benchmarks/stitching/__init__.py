"""Measure whether calls without a name are joined into their episodes."""
