"""The format of chat completions."""
