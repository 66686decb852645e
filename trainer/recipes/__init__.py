"""Packaged recipes (TOML)."""
