"""Kill processes and take a database away under many calls, and count what is lost."""
