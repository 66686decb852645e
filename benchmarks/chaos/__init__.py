"""Kill processes and stop the database under load, and count lost calls, feedback and episodes."""
