"""HTTP/1.1 server and client: httptools parses, asyncio carries (docs/decisions/014-serving.md)."""
