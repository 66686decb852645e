"""Read what is stored: episodes, finished updates, and counts."""
