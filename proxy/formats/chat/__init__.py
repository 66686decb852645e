"""Read and write chat completions."""
