"""Limits that a request must pass before it is handled: size, shape, and room in memory."""
