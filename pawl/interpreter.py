"""Make command lines that run this Python and import nothing from the working directory.

`python -m` and `python -c` look for modules in the working directory first. An agent's project may
well have a folder `proxy` or `store` there.
"""

import sys


def run_module(name: str) -> list[str]:
    """Return the command line that runs the module `name`; its arguments are to be appended."""
    return [sys.executable, "-P", "-m", name]


def run_code(code: str) -> list[str]:
    """Return the command line that runs a piece of Python."""
    return [sys.executable, "-P", "-c", code]
