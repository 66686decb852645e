"""Define the commands of `pawl`, one module for each group of them."""
