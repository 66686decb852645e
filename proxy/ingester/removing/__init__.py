"""Remove what was deleted, and what is outdated, from the database and this machine's disk."""
