"""The training process: polls the store, assigns credit, trains, publishes.

One update crosses these modules in this order: `store.claims` (whole groups) → `credit`
and `air` (pure) → `rows` and `batching` (pure) → `learners` (TRL) → `adapters` (files) →
`store.claims.consume` → `publish` (into vLLM) → `store.policies.promote`. `loop` holds that
on one page.
"""
