"""The proxy: forwards calls, records them, and takes feedback.

A call passes these modules in this order: `door.routes` (the allow-list), `calls.handler` and
`intake` (its body is read), `calls.call` (drives the rest), `identity` (its episode, agent and
task), `policies.versions` (its policy version), `formats` (rewriting the request and following the
reply, pure), `upstreams`, and `spool.recorder` (its record is durable). Off the request's path
`keeper` moves records to PostgreSQL. A call never waits for the trainer, nor more than 50 ms for
the database.
"""
