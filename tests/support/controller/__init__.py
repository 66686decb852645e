"""Make versions for a controller to load, to judge and to watch."""
