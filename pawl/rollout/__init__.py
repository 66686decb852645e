"""Run any agent on a file of tasks, using the proxy by HTTP and the trainer not at all."""
