"""Measure the figures in the documents; each module runs with `python -m`."""
