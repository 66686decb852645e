"""Scenarios, the demo's among them: the agent, and what is counted at the end."""
