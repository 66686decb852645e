"""Identify a call's episode, agent and task, by names and by repeated content (pure)."""
