"""Say why a policy learns, or why it does not: gather facts once, and check them by pure rules."""
