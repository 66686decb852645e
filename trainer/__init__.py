"""Train policies: poll the store, assign credit, train, and write new versions.

One update passes through these modules in this order, as `loop` shows on one page:
`updates.claiming` (whole groups), `credit` and `batches` (pure, by `updates.plan`), `learners`
(TRL, by `updates.training`), `publishing.adapters` (files), `updates.recording` (episodes are
consumed). The controller loads what is written into the model server, and promotes it.
"""
