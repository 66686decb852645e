"""Find the upstream of a call: servers and their replicas, by model name, or a library instead."""
