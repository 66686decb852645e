"""Start each contender as a fair user would: one worker, one core.

LiteLLM is set up by its own advice for production (log level, no cost map from the network).
Agent Lightning gets one rollout, made beforehand, whose id stands in the URL.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.error import URLError

from benchmarks.commits import ROOT, environment_of
from benchmarks.proxy import wire
from benchmarks.proxy.additions import Prepare, prepared
from benchmarks.proxy.ledger import Ledger
from benchmarks.proxy.machine import MEASURED_CORE, on_core, running, wait_for
from benchmarks.proxy.peers.install import (
    AGENT_LIGHTNING,
    AGENT_LIGHTNING_VERSION,
    LITELLM,
    LITELLM_VERSION,
    Environment,
)
from benchmarks.proxy.peers.nginx import nginx, passing_on
from benchmarks.proxy.probe import answers, fetched
from benchmarks.stack import free_port
from store.embedded import EmbeddedPostgres

PATH = "/v1/chat/completions"
ROLLOUT = "bench"


@dataclass(frozen=True, slots=True)
class Running:
    """Hold a peer that is up: `roots` names its process trees, `ledger` is where calls end.

    `key` is what it is called with.
    """

    port: int
    path: str = PATH
    key: str = wire.KEY
    roots: Mapping[str, int] = field(default_factory=dict)
    ledger: Ledger | None = None

    @property
    def url(self) -> str:
        """Return where chat completions are asked for."""
        return f"http://127.0.0.1:{self.port}{self.path}"


Start = Callable[[Path, int], AbstractContextManager[Running]]


@dataclass(frozen=True, slots=True)
class Contender:
    """Define a peer: how it starts in a folder in front of an upstream's port, what it needs."""

    name: str
    start: Start
    version: str = ""
    environment: Environment | None = None
    no_streams: str = ""


@contextmanager
def direct(_folder: Path, upstream: int) -> Iterator[Running]:
    """Put nothing between."""
    yield Running(upstream)


@contextmanager
def floor(folder: Path, upstream: int) -> Iterator[Running]:
    """Start nginx, passing on."""
    port = free_port()
    with nginx(folder, port, passing_on(port, upstream), MEASURED_CORE) as pid:
        yield Running(port, roots={"proxy": pid})


@contextmanager
def pawl(folder: Path, upstream: int) -> Iterator[Running]:
    """Start Pawl with everything on: ids, durable records, PostgreSQL on its core, a log file."""
    with pawl_of(ROOT, folder, upstream) as up:
        yield up


@contextmanager
def pawl_of(
    sources: Path, folder: Path, upstream: int, prepare: Prepare | None = None
) -> Iterator[Running]:
    """Start the same from a folder of sources, with a database that `prepare` prepared."""
    port, admin, log = free_port(), free_port(), folder / "pawl.log"
    postgres = EmbeddedPostgres(folder)
    with ExitStack() as stack:
        with on_core(MEASURED_CORE):
            url = postgres.ensure_running()
        stack.callback(postgres.stop)
        key = wire.KEY if prepare is None else prepared(url, prepare)
        environment = {
            **environment_of(sources),
            "DATABASE_URL": url,
            "PAWL_UPSTREAM_URL": f"http://127.0.0.1:{upstream}/v1",
            "PAWL_LISTEN": f"127.0.0.1:{port}",
            "PAWL_ADMIN_LISTEN": f"127.0.0.1:{admin}",
            "PAWL_SPOOL_DIR": str(folder / "spool"),
        }
        command = [sys.executable, "-m", "pawl.cli", "proxy"]
        process = stack.enter_context(running(command, MEASURED_CORE, log, environment))
        wait_for(lambda: _has_database(f"http://127.0.0.1:{admin}/readyz"), process, log)
        assert postgres.pid is not None
        roots = {"proxy": process.pid, "postgres": postgres.pid}
        yield Running(port, key=key, roots=roots, ledger=Ledger(url))


def _has_database(url: str) -> bool:
    with suppress(URLError, OSError):
        return bool(fetched(url)["database"] == "up")
    return False


@contextmanager
def litellm(folder: Path, upstream: int) -> Iterator[Running]:
    """Start LiteLLM's proxy, without a database: it keeps nothing."""
    port, config, log = free_port(), folder / "litellm.json", folder / "litellm.log"
    to = {"model": f"hosted_vllm/{wire.MODEL}", "api_base": f"http://127.0.0.1:{upstream}/v1"}
    settings = {"model_list": [{"model_name": wire.MODEL, "litellm_params": to}]}
    # JSON is YAML as well.
    config.write_text(json.dumps(settings))
    quiet = {"LITELLM_LOG": "ERROR", "LITELLM_MODE": "PRODUCTION"}
    environment = quiet | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": wire.KEY}
    command = [LITELLM.program("litellm"), "--config", str(config), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--num_workers", "1", "--telemetry", "False"]
    with running(command, MEASURED_CORE, log, environment) as process:
        wait_for(lambda: answers(f"http://127.0.0.1:{port}/health/liveliness"), process, log)
        yield Running(port, roots={"proxy": process.pid})


@contextmanager
def agent_lightning(folder: Path, upstream: int) -> Iterator[Running]:
    """Start Agent Lightning's server, which keeps calls in memory."""
    port, log = free_port(), folder / "agent-lightning.log"
    root = f"http://127.0.0.1:{port}"
    command = [AGENT_LIGHTNING.program("python"), "-m", "agentlightning.server"]
    command += ["host=127.0.0.1", f"port={port}", f"default_proxy.model_name={wire.MODEL}"]
    # Hydra writes its own log beside it.
    command += [f"hydra.run.dir={folder}"]
    with running(command, MEASURED_CORE, log) as process:
        wait_for(lambda: answers(f"{root}/healthz"), process, log)
        endpoint = f"http://127.0.0.1:{upstream}/v1"
        fetched(f"{root}/api/models", [{"model": wire.MODEL, "endpoint": endpoint}])
        fetched(f"{root}/api/rollouts", [{"input": {}, "rollout_id": ROLLOUT}])
        path = f"/proxy/rollout/{ROLLOUT}/attempt/0/mode/train/openai{PATH}"
        yield Running(port, path=path, roots={"proxy": process.pid})


CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender("direct", direct),
        Contender("nginx", floor),
        Contender("pawl", pawl),
        Contender("litellm", litellm, LITELLM_VERSION, LITELLM),
        Contender(
            "agent-lightning",
            agent_lightning,
            AGENT_LIGHTNING_VERSION,
            AGENT_LIGHTNING,
            no_streams="it refuses `stream: true`",
        ),
    )
}
