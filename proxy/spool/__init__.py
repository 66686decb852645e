"""Spool records to disk before their replies end, in segments that survive damage."""
