"""Batches: from credited transitions to the rows and micro-batches of an update (pure)."""
