"""The proxy: forwards calls, records them, and takes feedback.

A call passes these modules in this order: `routes` (the allow-list), `relay` and `intake` (its
body is read), `call` (drives the rest), `identity` (its episode, agent and task), `versions` (its
policy version), `formats` (rewriting the request and following the reply, pure), `upstreams`,
and `recorder` with `spool` (its record is durable). Off the request's path `keeping` moves records
to PostgreSQL. A call never waits for the trainer, nor more than 50 ms for the database.
"""
