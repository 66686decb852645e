"""Look up policies and their versions as the workers see them."""
