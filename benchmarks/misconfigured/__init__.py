"""Measure what a misconfiguration costs: episodes until it is known, seconds until all is well."""
