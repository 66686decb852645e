"""Read and write the wire formats, a pure module each: bytes in; bytes, token ids and facts out."""
