"""The ways in which an agent is run: as a program, or as a Python function that stays warm."""
