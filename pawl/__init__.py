"""The command line and the local stack. Composition root: nothing imports it."""
