"""Explore: sample a share of a policy's episodes so that something can be learned of it."""
