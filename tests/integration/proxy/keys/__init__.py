"""Whom the proxy lets in, for what and how often, and what is another tenant's."""
