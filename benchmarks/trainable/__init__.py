"""Measure which share of real frameworks' calls can be trained, each at its own defaults."""
