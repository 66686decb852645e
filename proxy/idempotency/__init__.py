"""Idempotency keys: each stands for one body, whichever worker or proxy a repeat reaches."""
