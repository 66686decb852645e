"""A real Prometheus with our configuration: every panel has data, every rule works, keys are sent.

A proxy, a trainer, a controller and a model server that computes are up, and agents work until
every query of the dashboard has data; what agents do seldom is done once.
"""

import asyncio
import json
import math
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import aiohttp
import pytest
import pytest_asyncio

from benchmarks.chaos.trainer import ComputingServer, RunPlace
from benchmarks.stack import free_port
from tests.support.controller.canary_kills import RECIPE, Clients
from tests.support.docs.guides import CLIENTS
from tests.support.faults.stand import Stand, running_stand
from tests.support.servers.fake_upstream import FakeUpstream, answers, fake_upstream
from tests.support.trainer.scored_episodes import BASE, write_model
from tests.support.trainer.zygote import zygote
from tests.support.waiting import awaited, until_true
from tests.unit.deploy.test_dashboards import (
    INTERVALS,
    ROOT,
    Query,
    dashboard_queries,
    rules,
    variables,
)

PROMETHEUS: Final = shutil.which("prometheus") or shutil.which("prometheus", path=CLIENTS)
AMTOOL: Final = shutil.which("amtool") or shutil.which("amtool", path=CLIENTS)
pytestmark = [
    pytest.mark.skipif(
        not PROMETHEUS, reason="Prometheus is not installed (scripts/install_clients.py says why)"
    ),
    pytest.mark.timeout(900),
]

LASTS_S: Final = 600.0
# As Grafana fills it in where a scrape comes every two seconds.
WINDOW: Final = "8s"
# All but what is known of GPUs only.
QUERIES: Final = [
    query for query in dashboard_queries() if "pawl_update_mfu" not in query.expression
]
POLICIES: Final = f"""
[[policy]]
name = "{BASE}"
base = "{BASE}"
models = ["{BASE}"]
"""
UPSTREAMS: Final = """
[[upstream]]
name = "local"
urls = ["{local}"]
default = true
[[upstream]]
name = "chatting"
urls = ["{chatting}"]
models = ["m"]
"""
TOOL: Final = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}


class Prometheus:
    """A running server, and what is asked of it."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self._began = time.time()

    def get(self, path: str, **asked: Any) -> Any:
        """GET a page of the API, and return its data."""
        with urlopen(f"{self._url}/api/v1/{path}?{urlencode(asked)}", timeout=30.0) as reply:
            return json.load(reply)["data"]

    def is_up(self) -> bool:
        try:
            self.get("status/runtimeinfo")
        except (HTTPError, URLError):
            return False
        return True

    def values(self, expression: str) -> list[float]:
        """Return all numbers that a query gave since the beginning."""
        times = {"start": self._began, "end": time.time(), "step": "1s"}
        found = self.get("query_range", query=expression, **times)["result"]
        numbers = [float(value) for series in found for _, value in series["values"]]
        return [number for number in numbers if not math.isnan(number)]

    def now(self, expression: str) -> dict[str, float]:
        """Return the value of each job."""
        found = self.get("query", query=expression)["result"]
        return {series["metric"]["job"]: float(series["value"][1]) for series in found}

    def alerts(self) -> set[tuple[str, str]]:
        """Return what is pending or firing: the alert's name and the job."""
        found = [alert["labels"] for alert in self.get("alerts")["alerts"]]
        return {(labels["alertname"], labels.get("job", "")) for labels in found}


class Watched(NamedTuple):
    """A proxy that was used, the Prometheus that watches it, and where its key goes."""

    stand: Stand
    prometheus: Prometheus
    key_file: Path


@contextmanager
def running_prometheus(folder: Path, targets: dict[str, str]) -> Iterator[Prometheus]:
    """Run one with our configuration, in which these targets and the folders are others."""
    text = (ROOT / "prometheus.yml").read_text()
    folders = {"/etc/prometheus/rules": str(ROOT / "rules"), "/etc/prometheus": str(folder)}
    seconds = {"_interval: 10s": "_interval: 2s", "_interval: 30s": "_interval: 2s"}
    for name, ours in (targets | folders | seconds | {"_timeout: 8s": "_timeout: 2s"}).items():
        assert name in text
        text = text.replace(name, ours)
    (config := folder / "prometheus.yml").write_text(text)
    assert PROMETHEUS is not None
    port = free_port()
    command = [PROMETHEUS, f"--config.file={config}", f"--web.listen-address=127.0.0.1:{port}"]
    command.append(f"--storage.tsdb.path={folder / 'metrics'}")
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    prometheus = Prometheus(port)
    try:
        until_true(prometheus.is_up)
        yield prometheus
    finally:
        process.terminate()
        process.wait()


async def use_everything(stand: Stand, chatting: FakeUpstream, prometheus: Prometheus) -> None:
    """Use everything once, and train until each query has data, or for `LASTS_S` at most."""
    is_over, without = asyncio.Event(), [*QUERIES]
    working = asyncio.create_task(Clients(stand.port, seed=5).run(is_over))
    async with aiohttp.ClientSession(f"http://127.0.0.1:{stand.port}") as session:
        await use_once(session, chatting)

    async def left() -> list[Query]:
        for query in without[:]:
            if await asyncio.to_thread(data_of, prometheus, query):
                without.remove(query)
        return without

    await awaited(left, lambda queries: not queries, within_s=LASTS_S)
    is_over.set()
    await working


def data_of(prometheus: Prometheus, query: Query) -> list[float]:
    """Return what a query of the dashboard gave so far, with `All` chosen of each variable."""
    asked = INTERVALS.sub(WINDOW, query.expression)
    for name, variable in variables().items():
        asked = asked.replace(f"${name}", variable["allValue"])
    return prometheus.values(asked)


async def use_once(session: aiohttp.ClientSession, chatting: FakeUpstream) -> None:
    """Use everything once but the episodes that are trained on."""

    async def ask(wanted: int, path: str, headers: Any = None, **body: Any) -> None:
        async with session.post(path, json=body, headers=headers) as reply:
            assert reply.status == wanted, await reply.text()

    chat = {"model": "m", "messages": [{"role": "user", "content": "q"}]}
    path = "/episode/chat/v1/chat/completions"
    await ask(200, path, {"x-pawl-tool-status": "not a ( list"}, **chat, tools=[TOOL])
    await ask(200, path, **chat, stream=True)
    chatting.behave = answers({"error": {"message": "broken"}}, 500)
    await ask(500, path, **chat)
    await ask(200, "/feedback", metric="tool_status", value="ok", episode="chat", id="t")
    await ask(202, "/feedback", episode="comes later", value=1.0)
    await ask(404, "/not/allowed")
    async with session.get("/v1/models") as reply:
        assert reply.status == 200
    completion = {"model": BASE, "prompt": (5, 6, 7, 8), "max_tokens": 2, "temperature": 0.1}
    await ask(200, "/episode/evaluated/split/eval/v1/completions", **completion)
    await ask(200, "/feedback", episode="evaluated", value=1.0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def watched(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Watched]:
    """All of it, after it was used; only the clients have ended."""
    folder = tmp_path_factory.mktemp("prometheus")
    write_model(folder / "model")
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "policies.toml").write_text(POLICIES)
    (folder / "keys").mkdir()
    (folder / "keys" / "metrics").touch()
    async with AsyncExitStack() as exits:
        chatting = await exits.enter_async_context(fake_upstream())
        forks = exits.enter_context(zygote(folder / "zygote.log"))
        server = ComputingServer(forks, folder, folder / "model")
        server.start()
        exits.callback(server.kill)
        local = f"http://127.0.0.1:{server.port}/v1"
        (folder / "upstreams.toml").write_text(UPSTREAMS.format(local=local, chatting=chatting.url))
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("PAWL_UPSTREAMS", str(folder / "upstreams.toml"))
            environment.setenv("PAWL_POLICIES", str(folder / "policies.toml"))
            stand = await exits.enter_async_context(running_stand(folder, local, workers=2))
        place = RunPlace(folder, stand.url, (BASE,), folder / "model")
        settings = place.settings(server.port)
        for role in ("trainer", "controller"):
            pid = forks.start(role, folder / f"{role}.log", settings)
            exits.callback(forks.end, pid, signal.SIGTERM)
        targets = {
            "proxy:8101": f"127.0.0.1:{stand.admin}",
            "trainer:8102": settings["PAWL_TRAINER_LISTEN"],
            "controller:8103": settings["PAWL_CONTROLLER_LISTEN"],
            "vllm:8000": f"127.0.0.1:{server.port}",
            "alertmanager:9093": f"127.0.0.1:{free_port()}",
        }
        prometheus = exits.enter_context(running_prometheus(folder, targets))
        # What is done before the first scrape is in no rate.
        until_true(lambda: prometheus.now("up").get("pawl-proxy"))
        await use_everything(stand, chatting, prometheus)
        yield Watched(stand, prometheus, folder / "keys" / "metrics")


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.where)
def test_query_of_the_dashboard_has_data(watched: Watched, query: Query) -> None:
    assert data_of(watched.prometheus, query)


@pytest.mark.parametrize(
    "series",
    [
        'pawl_calls_not_trainable_total{reason="nested_too_deep"}',
        'pawl_refused_total{reason="TooMany"}',
        'pawl_refused_total{reason="slow_body"}',
        'pawl_feedback_total{metric="tool_status", result="known"}',
        'pawl_tool_events_total{status="denied"}',
        'pawl_outdated_total{what="episodes"}',
        'pawl_withheld_total{reason="unreadable"}',
        'pawl_updates_total{outcome="rejected"}',
        'pawl_controller_gate_moves_total{to="rolled_back"}',
        'pawl_controller_loads_total{outcome="refused"}',
    ],
)
def test_prometheus_sees_each_counter_begin_at_0(watched: Watched, series: str) -> None:
    assert watched.prometheus.values(series)[:1] == [0.0]


def test_alert_rules_are_evaluated_without_error(watched: Watched) -> None:
    [group] = watched.prometheus.get("rules")["groups"]
    assert [rule["name"] for rule in group["rules"]] == [rule["alert"] for rule in rules()]
    assert {rule["health"] for rule in group["rules"]} == {"ok"}


def test_proxy_with_keys_is_scraped_once_prometheus_has_a_key_in_its_key_file(
    watched: Watched,
) -> None:
    prometheus, environment = watched.prometheus, watched.stand.environment
    create = [sys.executable, "-m", "pawl.cli", "keys", "create", "metrics", "--scope", "read"]
    key = subprocess.run(create, env=environment, check=True, capture_output=True, text=True)
    until_true(lambda: prometheus.now("up")["pawl-proxy"] == 0)
    until_true(lambda: ("PawlDown", "pawl-proxy") in prometheus.alerts())
    watched.key_file.write_text(key.stdout)
    until_true(lambda: prometheus.now("up")["pawl-proxy"] == 1)
    until_true(lambda: ("PawlDown", "pawl-proxy") not in prometheus.alerts())


def test_example_alertmanager_configuration_is_valid() -> None:
    if AMTOOL is None:
        pytest.skip("amtool is not installed")
    subprocess.run([AMTOOL, "check-config", ROOT / "alertmanager.yml"], check=True)
