"""Writing of recorded calls and feedback."""
