"""The proxy: forwards calls, records them, and takes feedback.

A call passes these modules in this order: `door.routes` (the allow-list), `calls.handler` and
`intake` (its body is read), then `calls.call`, which drives its steps: `calls.asking` with
`identity` (its episode, agent and task), `calls.routing` with `policies.versions` (its policy
version), `formats` (the rewritten request, pure) and `upstreams`, `calls.answering` (the reply goes
back), and `calls.recording` with `spool.recorder` (its record is durable). Off the request's path
`keeper` moves records to PostgreSQL. A call never waits for the trainer, nor more than 50 ms for
the database.
"""
