"""Measure merged prefixes: the same gradient, fewer tokens, less time; and how near the peak."""
