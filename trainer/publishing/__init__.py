"""Publishing: a version's files, its probe, and the model servers that load it."""
