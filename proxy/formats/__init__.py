"""Wire formats as pure functions: bytes in; bytes, token ids and facts out."""
