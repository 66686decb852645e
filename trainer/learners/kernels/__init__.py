"""Compute forward and backward passes fast on a CPU, and the same each time."""
