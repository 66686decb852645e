"""Run an agent as a program, or as a Python function that stays warm."""
