"""Compare what a model server says of a version with what the trainer computes."""
