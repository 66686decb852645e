"""Show that an unchanged agent works through the proxy and gets better."""
