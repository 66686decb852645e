"""Judges: programs and models that score finished episodes."""
