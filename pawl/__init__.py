"""Compose the command line and the local stack; nothing imports this package."""
