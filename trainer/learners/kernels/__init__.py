"""Compute forward and backward passes fast, and with the same result each time."""
