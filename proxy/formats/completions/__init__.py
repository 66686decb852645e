"""Read and write text completions."""
