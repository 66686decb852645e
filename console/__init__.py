"""The console: pages on which people see what their agents do, and whether the policies learn."""
