"""The packaged recipes, as TOML files."""
