"""Forward calls, record them, and take feedback on them.

`routing` (the allow-list) and `keys` (API keys) check each request. Then `calls.call` answers a
recorded call, `forwarding` passes other requests on, and `feedback` accepts statements. A call's
record goes to the `spool`; off the request's path, `ingester` moves records to PostgreSQL. A call
never waits for the trainer, and only briefly for the database.
"""
