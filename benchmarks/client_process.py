"""Run a client, in the clients' own environment, that is told nothing but where the server is."""

import asyncio
import os
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
BINARIES: Final = ROOT / ".venv-clients" / "bin"


class ClientFailed(Exception):
    """Report that a client cannot be run, ended with an error, or did not end in time."""


def require_clients() -> None:
    """Check that the clients are installed.

    Raises:
        ClientFailed: they are not; the message says how to install them.
    """
    if not BINARIES.is_dir():
        raise ClientFailed("no clients here: `make test` or scripts/install_clients.py gets them")


def environment(base_url: str) -> dict[str, str]:
    """Return all that a client is told: where the server is, and to call nobody else."""
    return {
        "PATH": f"{BINARIES}{os.pathsep}{os.environ['PATH']}",
        "HOME": os.environ.get("HOME", "/"),
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": "unused",
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": "unused",
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }


async def run_client(base_url: str, *command: str | Path, within_s: float | None = None) -> str:
    """Run a client to its end, and return the last line that it printed.

    Raises:
        ClientFailed: the clients are not installed, or this one ended with an error (the message
            ends with what it printed), or not in time; no process is left behind.
    """
    require_clients()
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        env=environment(base_url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, errors = await asyncio.wait_for(process.communicate(), within_s)
    except TimeoutError as error:
        raise ClientFailed(f"did not end in {within_s:g} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise ClientFailed(errors.decode()[-4000:])
    return out.decode().splitlines()[-1]
