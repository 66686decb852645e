"""Let each idempotency key stand for one body, whichever worker or proxy a repeat reaches."""
