"""The demo: an unchanged agent works through the proxy and gets better."""
