"""Find the upstream of a call by model name: a server with replicas, or a library."""
