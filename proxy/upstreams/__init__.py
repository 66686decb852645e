"""Upstreams: servers and their replicas, chosen by a model's name, or a library in their place."""
