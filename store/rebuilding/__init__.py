"""Choose what a rebuild leaves out, read past updates without it, and put a new line in place."""
