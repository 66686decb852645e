"""`python -m benchmarks.rollout`: what the agent runner costs, and whether a kill loses a run."""
