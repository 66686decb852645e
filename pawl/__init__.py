"""The command line and the local stack; no other package imports this one."""
