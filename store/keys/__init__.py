"""Keep the API keys: their hashes, what each may do, and whether it still counts."""
