"""Judges: programs or models that read finished episodes and score them."""
