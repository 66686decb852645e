"""Define a wire format for tests: as small as one can be, and like none of the others."""
