"""Forward calls, record them, and take feedback on them.

A call passes these modules in this order: `door.routes` (the allow-list), `keys.gate` (its key),
then `calls.call`, which drives its steps: `calls.asking` with `intake` (its body is read) and
`identity` (its episode, agent and task), `calls.routing` with `policies.versions` (its policy
version), `formats` (the rewritten request, pure) and `upstreams`, `calls.answering` (the reply goes
back), and `calls.recording` with `spool.recorder` (its record is durable). Off the request's path
`keeper` moves records to PostgreSQL. A call never waits for the trainer, nor more than 50 ms for
the database.
"""

from pathlib import Path

# `make install` once compiled a checkout's proxy in its place, and Python would prefer that.
if Path(__file__).with_name("compiled.json").exists():
    raise ImportError(
        "extensions that an earlier version compiled lie beside the proxy's sources and would run "
        "in their place: `make install` deletes them"
    )
