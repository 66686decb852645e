"""Identify a call: its episode, agent and task, from names and from what it repeats (pure)."""
