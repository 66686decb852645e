"""The format of text completions."""
