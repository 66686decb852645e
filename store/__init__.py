"""The ledger: the only code that knows SQL.

Both processes stand on it and it knows neither of them: the proxy's drainer writes
calls and feedback, the trainer claims episodes, records updates and moves policies.
What crosses its border are the frozen records of `store.records`.
"""
