"""Run a scenario: an unchanged agent works through the proxy while its model is trained."""
