"""Judges: programs or models that are shown finished episodes and say what they are worth."""
