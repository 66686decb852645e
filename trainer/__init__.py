"""The training process: it polls the store, assigns credit, trains and publishes.

One update passes through these modules in this order: `store.updates.claims` (whole groups),
`credit` and `air` (pure), `rows` and `batching` (pure), `learners` (TRL), `adapters` (files),
`store.updates.claims.consume`, `publish` (into vLLM), `store.updates.policies.promote`. `loop`
shows all of it on one page.
"""
