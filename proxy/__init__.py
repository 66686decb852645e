"""The serving process: passes calls on, records them, takes feedback.

A call crosses these modules in this order: `routes` (allow-list) → `identity` (episode,
agent, task) → `versions` (which policy version) → `dialects` (rewrite and transcribe, pure)
→ `upstream` → `call` (the only place bytes flow both ways) → `spool` (durable) and, off
the request's path, `drain` (to PostgreSQL). It never waits for the database or the trainer.
"""
