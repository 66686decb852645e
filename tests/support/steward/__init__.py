"""Make versions for a steward to load, to judge and to watch."""
