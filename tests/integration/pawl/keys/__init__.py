"""API keys: how they are made and shown, and Pawl's own clients with one."""
