"""Forward calls, record them, and take feedback on them.

A call passes these modules in this order: `door.routes` (the allow-list), `keys.gate` (its key),
then `calls.call`, which drives its steps: `calls.asking` with `intake` (its body is read) and
`identity` (its episode, agent and task), `calls.routing` with `policies.versions` (its policy
version), `formats` (the rewritten request, pure) and `upstreams`, `calls.answering` (the reply goes
back), and `calls.recording` with `spool.recorder` (its record is durable). Off the request's path
`ingester` moves records to PostgreSQL. A call never waits for the trainer, nor more than 50 ms for
the database.
"""
