"""Compute forward and backward passes fast and deterministically."""
