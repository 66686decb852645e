"""Run what stands beside trainers that are killed: a model server, a steward, and a proxy."""
