"""Who answers for a model: servers and their replicas, by name, or a library in their place."""
