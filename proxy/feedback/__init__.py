"""POST /feedback: statements about calls and episodes."""
