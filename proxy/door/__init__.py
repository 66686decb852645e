"""Open the data port's door: routes, refusals, and requests that are only passed on."""
