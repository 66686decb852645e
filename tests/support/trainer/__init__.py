"""Run trainers in this process, on real tables."""
