"""One pure module a wire format: bytes in; bytes, ids and facts out. No I/O, no clock."""
