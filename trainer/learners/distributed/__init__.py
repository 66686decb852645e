"""One learner in several processes."""
