"""Measure the figures in the documents; run each module with `python -m`."""
