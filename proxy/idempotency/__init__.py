"""One statement of feedback under one `Idempotency-Key`, wherever its repeats arrive."""
