"""The ledger: the only package that contains SQL.

Proxy and trainer depend on this package, and it depends on neither. The ingester's drainer writes
calls and feedback. The trainer claims episodes, records updates and changes versions' states.
"""

__version__ = "0.1.0"


def install_command(extra: str) -> str:
    """Return the pip command for Pawl's wheel file with an extra; Pawl is not on PyPI."""
    return f"pip install 'pawl_rl-{__version__}-py3-none-any.whl[{extra}]'"
