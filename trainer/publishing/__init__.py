"""Publish versions: their files, their probe, and the model servers that load them."""
