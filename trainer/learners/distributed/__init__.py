"""Run one learner in several processes."""
