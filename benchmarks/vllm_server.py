"""Run a bare vLLM for the length of a block, for benchmarks and tests to measure against.

The stack's own (`pawl.stack`) is kept up and restarted; here a server that ends is a failure.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import cycle
from pathlib import Path
from random import SystemRandom
from typing import Final

import aiohttp

READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.2
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}


def _ports() -> Iterator[int]:
    """Yield ports in an order of this process's own, and none twice before all.

    They lie below those that Linux gives to outgoing connections, one of which might take what is
    free now. Each worker of the tests has its own: another would take what is not bound yet.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    ports = list(range(20_000 + worker, 32_768, workers))
    # Hypothesis gives `random` the same seed in each process.
    SystemRandom().shuffle(ports)
    return cycle(ports)


PORTS: Final = _ports()


def free_port() -> int:
    """Return a port that nothing listens on, and that was not returned before."""
    for port in PORTS:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("the cycle of ports has ended")


@contextmanager
def vllm_server(
    arguments: Sequence[str], environment: Mapping[str, str], port: int | None = None
) -> Iterator[str]:
    """Yield its root URL once it answers; end its whole process group when the block is left.

    Raises:
        RuntimeError: it did not come up; the message ends with its log's last lines.
    """
    port = port or free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.NamedTemporaryFile("w+", prefix="vllm-", suffix=".log") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "pawl.stack.vllm_server", "--enforce-eager"),
                *("--host", "127.0.0.1", "--port", str(port)),
                *arguments,
            ],
            env=dict(os.environ) | QUIET | dict(environment),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            asyncio.run(_until_ready(url, process, Path(log.name)))
            yield url
        finally:
            _stop(process)


async def _until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    async with aiohttp.ClientSession() as session:
        while not await _is_ready(session, url):
            if process.poll() is not None or time.monotonic() > deadline:
                tail = "\n".join(log.read_text().splitlines()[-30:])
                raise RuntimeError(f"vLLM did not become ready:\n{tail}")
            await asyncio.sleep(POLL_S)


async def _is_ready(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health") as response:
            return response.status == 200
    except aiohttp.ClientConnectionError:
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop the whole group, as the engine is a child of the server, and wait for it."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
