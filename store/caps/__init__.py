"""Cap what one API key, or one task, may have of an update."""
