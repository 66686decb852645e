"""Run the embedded PostgreSQL: a cluster in a folder, shared by several processes."""
