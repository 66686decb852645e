"""Find why a policy does not learn: collect facts once, and check them by pure rules."""
