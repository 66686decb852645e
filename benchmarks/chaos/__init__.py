"""Processes killed, a database taken away, many calls: what is lost."""
