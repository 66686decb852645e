"""Whose call it is: episode, agent and task, from names, and from what a call repeats (pure)."""
