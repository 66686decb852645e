"""Run any agent on a file of tasks; it knows the proxy by its HTTP, and never the trainer."""
