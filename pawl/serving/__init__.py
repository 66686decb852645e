"""Run the processes of `pawl proxy`: a supervisor, a keeper, and workers."""
