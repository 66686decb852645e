"""Keep the ledger; no other package contains SQL.

Proxy and trainer both depend on it, and it depends on neither. The ingester's drainer writes
calls and feedback; the trainer claims episodes, records updates and moves policies. Callers
exchange only the frozen records of `store.records` with it.
"""

__version__ = "0.1.0"


def install_command(extra: str) -> str:
    """Return the command that installs the wheel with an extra; PyPI does not have the wheel."""
    return f"pip install 'pawl_rl-{__version__}-py3-none-any.whl[{extra}]'"
