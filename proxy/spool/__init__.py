"""The spool: records on disk before their replies end, in segments that survive damage."""
