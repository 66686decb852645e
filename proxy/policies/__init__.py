"""Policies and their versions as the workers see them."""
