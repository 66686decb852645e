"""Run a scenario: an unchanged agent works through the proxy, and gets better."""
