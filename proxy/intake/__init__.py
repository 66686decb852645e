"""Limit a request before it is handled: its size, its shape, and its room in memory."""
