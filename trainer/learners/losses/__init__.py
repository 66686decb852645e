"""Compute what a learner minimises: TRL's losses on recorded rows, and the KL to the base."""
