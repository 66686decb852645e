"""Train in several processes: programs for `accelerate launch`."""
