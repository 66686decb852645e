"""Keep what must not be stored out of the records of calls."""
