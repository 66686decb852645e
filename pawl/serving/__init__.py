"""Run the processes of `pawl proxy`: a supervisor, an ingester, and workers."""
