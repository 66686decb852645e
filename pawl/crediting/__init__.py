"""Show what calls are worth (`pawl credit`), for a file of episodes or an update that ran."""
