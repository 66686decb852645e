"""HTTP/1.1 both ways, lean: httptools parses, asyncio carries (docs/decisions/014-http.md)."""
