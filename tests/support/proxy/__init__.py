"""Ask proxies with keys, rules and grammars, and compare what they record."""
