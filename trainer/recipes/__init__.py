"""Read and check recipes; the packaged ones are the TOML files of this folder."""
