"""The ledger: the only package that contains SQL.

Proxy and trainer depend on this package, and it depends on neither. The ingester's drainer writes
calls and feedback; the trainer claims episodes, records updates and moves policies.
"""

__version__ = "0.1.0"


def install_command(extra: str) -> str:
    """Return the command that installs the wheel with an extra; PyPI does not have the wheel."""
    return f"pip install 'pawl_rl-{__version__}-py3-none-any.whl[{extra}]'"
