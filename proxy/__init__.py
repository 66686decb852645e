"""Forward calls, record them, and take feedback on them.

A request passes `routing` (the allow-list) and `keys` (its key); `calls.call` then takes a
call through its steps, `forwarding` passes other requests on, and `feedback` takes statements. A
call's record goes to the `spool`; off the request's path `ingester` moves records to PostgreSQL. A
call never waits for the trainer, nor more than 50 ms for the database.
"""
