"""Start each peer as a fair user would: one worker, one core.

LiteLLM is configured as its documentation advises for production (log level, no cost map from the
network). Agent Lightning gets one rollout, made beforehand, whose id is in the URL. Both are
installed in pinned versions into environments of their own under `var/peers`.
"""

import json
import os
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from rich.console import Console

from benchmarks import wire
from benchmarks.stack import ROOT, answers, fetch_json, free_port, running, running_proxy, wait_for

# The measured peer has a core to itself; the load and the model server share the other.
MEASURED_CORE, LOAD_CORE = 0, 1
LARGE_TOKENS, TOKENS = 1240, 20
# A request body of at most this many digits of length (under 1,000 bytes) gets the large reply.
SMALL_BODY_DIGITS: Final = 3
TRIES: Final = 3
LITELLM_VERSION, AGENT_LIGHTNING_VERSION = "1.106.2", "1.0.2"
ROLLOUT: Final = "bench"


class CannotInstall(Exception):
    """pip failed three times; the message ends with its reason."""


@dataclass(frozen=True, slots=True)
class Running:
    """A running peer.

    `roots` are the process ids at the roots of its process trees; `database_url` is the database
    that stores calls, empty if there is none.
    """

    port: int
    path: str = wire.CHAT
    roots: Mapping[str, int] = field(default_factory=dict)
    database_url: str = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}{self.path}"


@dataclass(frozen=True, slots=True)
class Contender:
    """A peer: its name, how to start it, and what to install before.

    `start` gets a folder and the upstream's port. `packages` has the arguments of one `pip install`
    after another. `no_streams` is the reason why streams are not measured.
    """

    name: str
    start: Callable[[Path, int], AbstractContextManager[Running]]
    version: str = ""
    packages: Sequence[Sequence[str]] = ()
    no_streams: str = ""

    @property
    def title(self) -> str:
        return f"{self.name} {self.version}".strip()


@contextmanager
def direct(_folder: Path, upstream: int) -> Iterator[Running]:
    yield Running(upstream)


@contextmanager
def floor(folder: Path, upstream: int) -> Iterator[Running]:
    """Start nginx, which only forwards requests and does not buffer streams."""
    port = free_port()
    server = f"""upstream model {{ server 127.0.0.1:{upstream}; keepalive 1100; }}
server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://model; proxy_buffering off;
 proxy_http_version 1.1; proxy_set_header Connection ""; }} }}"""
    with nginx(folder / "floor", port, server, MEASURED_CORE) as pid:
        yield Running(port, roots={"proxy": pid})


@contextmanager
def pawl(folder: Path, upstream: int, checkout: Path = ROOT) -> Iterator[Running]:
    """Start Pawl with everything on: ids, durable records, PostgreSQL on the same core, a log."""
    with running_proxy(folder, upstream, checkout, MEASURED_CORE) as proxy:
        roots = {"proxy": proxy.process.pid, "postgres": proxy.postgres_pid}
        yield Running(proxy.port, roots=roots, database_url=proxy.database_url)


@contextmanager
def litellm(folder: Path, upstream: int) -> Iterator[Running]:
    """Start LiteLLM's proxy without a database, so that it stores no calls."""
    port, config, log = free_port(), folder / "litellm.json", folder / "litellm.log"
    to = {"model": f"hosted_vllm/{wire.MODEL}", "api_base": f"http://127.0.0.1:{upstream}/v1"}
    # JSON is YAML as well.
    models = {"model_list": [{"model_name": wire.MODEL, "litellm_params": to}]}
    config.write_text(json.dumps(models))
    environment = {"LITELLM_LOG": "ERROR", "LITELLM_MODE": "PRODUCTION"}
    environment |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": wire.KEY}
    command = [program_path("litellm", "litellm"), "--config", str(config), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--num_workers", "1", "--telemetry", "False"]
    with running(command, log, environment, MEASURED_CORE) as process:
        wait_for(lambda: answers(f"http://127.0.0.1:{port}/health/liveliness"), process, log)
        yield Running(port, roots={"proxy": process.pid})


@contextmanager
def agent_lightning(folder: Path, upstream: int) -> Iterator[Running]:
    """Start Agent Lightning's server, which keeps calls in memory."""
    port, log = free_port(), folder / "agent-lightning.log"
    root = f"http://127.0.0.1:{port}"
    command = [program_path("agent-lightning", "python"), "-m", "agentlightning.server"]
    command += ["host=127.0.0.1", f"port={port}", f"default_proxy.model_name={wire.MODEL}"]
    # Hydra writes another log into this folder.
    command += [f"hydra.run.dir={folder}"]
    with running(command, log, {}, MEASURED_CORE) as process:
        wait_for(lambda: answers(f"{root}/healthz"), process, log)
        endpoint = f"http://127.0.0.1:{upstream}/v1"
        fetch_json(f"{root}/api/models", [{"model": wire.MODEL, "endpoint": endpoint}])
        fetch_json(f"{root}/api/rollouts", [{"input": {}, "rollout_id": ROLLOUT}])
        path = f"/proxy/rollout/{ROLLOUT}/attempt/0/mode/train/openai{wire.CHAT}"
        yield Running(port, path=path, roots={"proxy": process.pid})


def of_checkout(checkout: Path) -> Contender:
    """Return the `pawl proxy` of another checkout, run by this one's Python.

    Raises:
        ValueError: there is no checkout there.
    """
    if not (checkout / "pawl" / "cli.py").is_file():
        raise ValueError(f"{checkout} is not a checkout of Pawl")
    return Contender(str(checkout), partial(pawl, checkout=checkout.resolve()))


CONTENDERS: Final = {
    contender.name: contender
    for contender in (
        Contender("direct", direct),
        Contender("nginx", floor),
        Contender("pawl", pawl),
        Contender("litellm", litellm, LITELLM_VERSION, [[f"litellm[proxy]=={LITELLM_VERSION}"]]),
        Contender(
            "agent-lightning",
            agent_lightning,
            AGENT_LIGHTNING_VERSION,
            [
                # Its metadata asks for Python 3.12, but its server also runs on 3.11: it is
                # installed there without this check, and its dependencies are named here.
                [
                    f"agentlightning=={AGENT_LIGHTNING_VERSION}",
                    *(
                        ["--no-deps", "--ignore-requires-python"]
                        if sys.version_info < (3, 12)
                        else []
                    ),
                ],
                [
                    *("fastapi==0.165.0", "httpx-retries==0.6.0", "httpx==0.28.1"),
                    *("hydra-core==1.3.2", "jinja2==3.1.6", "kr8s==0.20.15", "omegaconf==2.3.0"),
                    *("pydantic==2.14.3", "pyyaml==6.0.3", "structlog==26.1.0", "uvicorn==0.54.0"),
                ],
            ],
            no_streams="it refuses `stream: true`",
        ),
    )
}


def program_path(peer: str, name: str) -> str:
    return str(ROOT / "var" / "peers" / peer / "bin" / name)


def install(contender: Contender, console: Console) -> None:
    """Install a peer's packages unless the same packages were installed before.

    Raises:
        CannotInstall: pip failed three times.
    """
    folder = ROOT / "var" / "peers" / contender.name
    done, wanted = folder / "installed.txt", repr(contender.packages)
    if not contender.packages or (done.exists() and done.read_text() == wanted):
        return
    console.print(f"installing {contender.name} into {folder} (minutes, once)")
    venv.create(folder, with_pip=True, clear=True)
    pip = [program_path(contender.name, "python"), "-m", "pip", "install", "--quiet"]
    for packages in contender.packages:
        for _ in range(TRIES):
            ended = subprocess.run([*pip, *packages], capture_output=True, text=True, check=False)
            if not ended.returncode:
                break
        else:
            raise CannotInstall(f"pip install {' '.join(packages)}: {ended.stderr[-300:]}")
    done.write_text(wanted)


@contextmanager
def model_server(folder: Path, port: int) -> Iterator[None]:
    """Run nginx as a model server: the reply to a small body has 100 KB, to any other 2.9 KB."""
    (folder / "large.json").write_text(wire.reply(LARGE_TOKENS))
    server = f"""server {{ listen 127.0.0.1:{port}; default_type application/json;
 location = /v1/models {{ return 200 '{wire.MODELS}'; }}
 location = /version {{ return 200 '{wire.VERSION}'; }}
 location = /large.json {{ root {folder}; error_page 405 =200 $uri; }}
 location / {{
  if ($content_length ~ "^\\d{{1,{SMALL_BODY_DIGITS}}}$") {{ rewrite ^ /large.json last; }}
  return 200 '{wire.reply(TOKENS)}'; }} }}"""
    with nginx(folder / "model", port, server, LOAD_CORE):
        yield


@contextmanager
def nginx(folder: Path, port: int, server: str, core: int) -> Iterator[int]:
    """Run nginx on one core, with one worker, and yield its process id."""
    folder.mkdir(parents=True)
    config, log = folder / "nginx.conf", folder / "nginx.log"
    # The worker must be able to read the folder.
    user = "user root;" if os.geteuid() == 0 else ""
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    places = " ".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    config.write_text(f"""{user} worker_processes 1; daemon off; pid {folder}/nginx.pid;
worker_rlimit_nofile 16384;
events {{ worker_connections 8192; }}
http {{ access_log off; keepalive_requests 100000000; keepalive_timeout 600;
 client_body_buffer_size 64k; {places}
{server} }}
""")
    command = ["nginx", "-p", str(folder), "-e", str(log), "-c", str(config)]
    with running(command, log, {}, core) as process:
        wait_for(lambda: answers(f"http://127.0.0.1:{port}/v1/models"), process, log)
        yield process.pid
