"""Find out before anything is started whether this machine's torch can be imported.

A build of torch for another machine (the CUDA build where there is no CUDA, or none at all for
this Python) fails at its import.
"""

import subprocess
import sys

from pawl.interpreter import run_code
from pawl.stack.preflight import NotReady


def unusable(reason: str) -> str:
    """Return the message for an import of torch, or of what needs it, that failed."""
    return (
        f"the trainer cannot be imported: {reason}. torch is missing, or its build does not fit "
        f"Python {sys.version_info[0]}.{sys.version_info[1]} and this machine: run `make install "
        "PYTHON=python3.11`, or install a build that fits"
    )


def check_torch() -> None:
    """Import torch in a process of its own, so that this one never does.

    Raises:
        NotReady: it cannot be imported; the message ends with the remedy.
    """
    done = subprocess.run(run_code("import torch"), capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise NotReady(unusable(lines[-1]))
