"""Compare what several seeds and learners of a scenario learned."""
