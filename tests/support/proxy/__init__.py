"""Ask proxies with keys and grammars, and compare what they record."""
