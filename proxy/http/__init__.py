"""Serve and ask by HTTP/1.1: httptools parses, asyncio carries (docs/decisions/014-serving.md)."""
