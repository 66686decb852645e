"""Show the policies: their versions, and the rewards of their evaluation (`pawl policies`)."""
