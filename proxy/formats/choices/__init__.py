"""The formats that answer in `choices`: chat completions and completions."""
