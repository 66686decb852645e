"""Keep the adapters of each replica of the model server loaded."""
