"""The spool's files: a locked folder for each worker, and the segment that it writes."""
