"""Forward recorded calls, pass their replies on, and record them."""
