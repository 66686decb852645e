"""Read the episodes that wait for a judge, and record the results of judging."""
