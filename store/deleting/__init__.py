"""Delete episodes from everywhere, keep them from being stored again, and say what was deleted."""
