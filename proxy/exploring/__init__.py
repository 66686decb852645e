"""Exploration: a share of a policy's episodes is sampled so that something can be learned of it."""
