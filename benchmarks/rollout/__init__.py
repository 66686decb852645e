"""Run `python -m benchmarks.rollout`: what the runner costs, and whether a kill loses a run."""
