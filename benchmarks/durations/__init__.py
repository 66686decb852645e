"""Simulate a day of long episodes that are scored late: who is trained, and what is loaded."""
