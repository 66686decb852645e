"""Make what tests must survive: a process that dies, a file that cannot be read."""
