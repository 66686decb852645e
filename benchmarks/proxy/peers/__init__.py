"""Define who is measured beside Pawl, how each is installed, and how each is started."""
