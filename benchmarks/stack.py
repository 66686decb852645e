"""Start the measured processes: a `pawl proxy`, a complete stack, and clients."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import cycle
from pathlib import Path
from random import SystemRandom
from typing import Any, Final, NamedTuple
from urllib.error import URLError
from urllib.request import Request, urlopen

from pawl.scenarios.scenario import packaged_template
from pawl.stack.stack import StackPlan
from pawl.stack.vllm import VllmOptions
from store.embedded import EmbeddedPostgres

ROOT: Final = Path(__file__).resolve().parents[1]
CLIENT_BINARIES: Final = ROOT / ".venv-clients" / "bin"
# The packaged chat template writes tool calls as this parser of vLLM's reads them.
TOOL_PARSER: Final = "pythonic"
READY_S: Final = 120.0
STOP_S: Final = 30.0
POLL_S: Final = 0.1


class NotUp(Exception):
    """A process did not come up; the message ends with the last lines of its log."""


class ClientFailed(Exception):
    """A client cannot be run, ended with an error, or did not end in time."""


def _ports() -> Iterator[int]:
    """Yield ports without end, in random order, each again only after all others.

    Linux never assigns these ports to outgoing connections, which might take a port that is free
    now. Each worker of the tests has ports of its own: another might take one before it is bound.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    ports = list(range(20_000 + worker, 32_768, workers))
    # Hypothesis gives `random` the same seed in each process.
    SystemRandom().shuffle(ports)
    return cycle(ports)


PORTS: Final = _ports()


def free_port() -> int:
    """Return a free port, other than those returned before."""
    for port in PORTS:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("the cycle of ports has ended")


@contextmanager
def on_core(core: int | None) -> Iterator[None]:
    """Restrict processes that are started in the block to this core (None: to no core)."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before if core is None else {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def running(
    command: Sequence[str | Path],
    log: Path,
    environment: Mapping[str, str] | None = None,
    core: int | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process in its own group, with its output in `log`; kill the group after the block."""
    with log.open("ab") as output, on_core(core):
        process = subprocess.Popen(
            [*map(str, command)],
            env={**os.environ, **(environment or {})},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(
    ready: Callable[[], bool],
    process: subprocess.Popen[bytes],
    log: Path,
    within_s: float = READY_S,
) -> None:
    """Wait until `ready` returns true.

    Raises:
        NotUp: the process has ended, or time is up.
    """
    deadline = time.monotonic() + within_s
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            last_lines = log.read_text(errors="replace").splitlines()[-30:]
            raise NotUp("\n".join(["a process did not come up:", *last_lines]))
        time.sleep(POLL_S)


def fetch_json(url: str, body: object | None = None) -> Any:
    """Return the JSON answer to a GET of `url`, or to a POST of `body`."""
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url, data, {"Content-Type": "application/json"}), timeout=30) as response:
        return json.load(response)


def answers(url: str) -> bool:
    """Return whether a GET of `url` is answered with status 200."""
    with suppress(URLError, OSError, ValueError), urlopen(url, timeout=2) as response:
        return bool(response.status == 200)
    return False


class Proxy(NamedTuple):
    """A running `pawl proxy`: its ports, its supervisor, its database, and PostgreSQL's process."""

    port: int
    admin: int
    process: subprocess.Popen[bytes]
    database_url: str
    postgres_pid: int


@contextmanager
def running_proxy(
    folder: Path,
    upstream_port: int,
    checkout: Path = ROOT,
    core: int | None = None,
    **settings: str,
) -> Iterator[Proxy]:
    """Run a checkout's `pawl proxy` with its own PostgreSQL; yield it once it is connected.

    Raises:
        NotUp: it did not come up.
    """
    port, admin, log, postgres = free_port(), free_port(), folder / "pawl.log", None
    with on_core(core):
        postgres = EmbeddedPostgres(folder)
        database_url = postgres.ensure_running()
    environment = {
        "PYTHONPATH": str(checkout),
        # `python -m` must not import modules from the working directory.
        "PYTHONSAFEPATH": "1",
        "DATABASE_URL": database_url,
        "PAWL_UPSTREAM_URL": f"http://127.0.0.1:{upstream_port}/v1",
        "PAWL_LISTEN": f"127.0.0.1:{port}",
        "PAWL_ADMIN_LISTEN": f"127.0.0.1:{admin}",
        "PAWL_SPOOL_DIR": str(folder / "spool"),
        **settings,
    }

    def has_database() -> bool:
        with suppress(URLError, OSError):
            return bool(fetch_json(f"http://127.0.0.1:{admin}/readyz")["database"] == "up")
        return False

    try:
        command = [sys.executable, "-m", "pawl.cli", "proxy"]
        with running(command, log, environment, core) as process:
            wait_for(has_database, process, log)
            assert postgres.pid is not None
            yield Proxy(port, admin, process, database_url, postgres.pid)
    finally:
        postgres.stop()


def small_plan(
    folder: Path, model: str, policy: str, recipe: str, *, tool_parser: str = TOOL_PARSER
) -> StackPlan:
    """Return a plan of a stack on free ports.

    All files are written into `folder`, `model` is the packaged model's folder, and `recipe` a
    recipe's name or file.
    """
    return StackPlan(
        vllm=VllmOptions(
            model=model,
            served_name=policy,
            port=free_port(),
            dtype="float32",
            max_model_len=1024,
            max_lora_rank=16,
            tool_parser=tool_parser,
            chat_template=packaged_template("smollm2_tools"),
        ),
        listen=f"127.0.0.1:{free_port()}",
        admin_listen=f"127.0.0.1:{free_port()}",
        trainer_listen=f"127.0.0.1:{free_port()}",
        controller_listen=f"127.0.0.1:{free_port()}",
        console_listen=f"127.0.0.1:{free_port()}",
        data_dir=folder,
        log_dir=folder / "logs",
        settings={
            "PAWL_SPOOL_DIR": str(folder.resolve() / "spool"),
            "PAWL_ADAPTER_DIR": str(folder.resolve() / "adapters"),
            "PAWL_RECIPE": recipe,
            "PAWL_SEED": "0",
            "PAWL_POLICY": policy,
            "PAWL_POLICIES": "",
            "PAWL_MODEL": model,
        },
    )


async def run_client(base_url: str, *command: str | Path, within_s: float | None = None) -> str:
    """Run a client in the clients' environment to its end; return the last line that it printed.

    The client gets only the server's address.

    Raises:
        ClientFailed: the clients are not installed, or this one ended with an error (the message
            ends with its standard error) or was killed because it did not end in time.
    """
    if not CLIENT_BINARIES.is_dir():
        raise ClientFailed("no clients here: `make test` or scripts/install_clients.py gets them")
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        env={
            "PATH": f"{CLIENT_BINARIES}{os.pathsep}{os.environ['PATH']}",
            "HOME": os.environ.get("HOME", "/"),
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": "unused",
            "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": "unused",
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
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
