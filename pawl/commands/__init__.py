"""The commands of `pawl`, one module for each group."""
