"""Turn credited transitions into the rows and micro-batches of an update (pure)."""
