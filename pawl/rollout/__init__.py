"""Run any agent on a file of tasks; only the proxy's HTTP API is needed, no trainer."""
