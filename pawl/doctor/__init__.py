"""Find why a policy does not learn: gather facts once, and check them by pure rules."""
