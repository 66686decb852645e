"""Install the peers' own environments: one venv each under `var/peers`, versions pinned."""

import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

PEERS = Path("var/peers")
TRIES = 3


class CannotInstall(Exception):
    """Report that the package index failed three times; the message ends with pip's reason."""


@dataclass(frozen=True, slots=True)
class Environment:
    """Define what pip is asked for, in steps: each a list of its arguments."""

    name: str
    steps: Sequence[Sequence[str]]

    @property
    def folder(self) -> Path:
        """Return where it lies."""
        return (PEERS / self.name).resolve()

    def program(self, name: str) -> str:
        """Return the path of one of its console scripts, or of its `python`."""
        return str(self.folder / "bin" / name)

    def ensure(self, console: Console) -> None:
        """Install it unless exactly this was installed before.

        Raises:
            CannotInstall: see there.
        """
        done = self.folder / "installed.txt"
        wanted = "\n".join(" ".join(step) for step in self.steps)
        if done.exists() and done.read_text() == wanted:
            return
        console.print(f"installing {self.name} into {self.folder} (minutes, once)")
        venv.create(self.folder, with_pip=True, clear=True)
        for step in self.steps:
            self._pip(step, console)
        done.write_text(wanted)

    def _pip(self, step: Sequence[str], console: Console) -> None:
        command = [self.program("python"), "-m", "pip", "install", "--quiet", *step]
        reason = ""
        for number in range(TRIES):
            again = " (again)" if number else ""
            # An extra's brackets are no markup.
            console.print(f"  pip install {' '.join(step)}{again}", markup=False)
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            reason = errors[-1] if errors else done.stderr[-300:]
        raise CannotInstall(f"pip install {' '.join(step)}: {reason}")


LITELLM_VERSION = "1.106.2"
LITELLM = Environment("litellm", [[f"litellm[proxy]=={LITELLM_VERSION}"]])

AGENT_LIGHTNING_VERSION = "1.0.2"
# Its metadata asks for Python 3.12, and its server runs on 3.11 as well: the package is taken
# without that check there, and what its metadata needs is named here.
AGENT_LIGHTNING = Environment(
    "agent-lightning",
    [
        [
            f"agentlightning=={AGENT_LIGHTNING_VERSION}",
            *(["--no-deps", "--ignore-requires-python"] if sys.version_info < (3, 12) else []),
        ],
        [
            *("fastapi==0.165.0", "httpx-retries==0.6.0", "httpx==0.28.1", "hydra-core==1.3.2"),
            *("jinja2==3.1.6", "kr8s==0.20.15", "omegaconf==2.3.0", "pydantic==2.14.3"),
            *("pyyaml==6.0.3", "structlog==26.1.0", "uvicorn==0.54.0"),
        ],
    ],
)
