"""The runner's parts, without a proxy."""
