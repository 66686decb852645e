"""Compute the losses of learners: TRL's losses on recorded rows, and the KL to the base."""
