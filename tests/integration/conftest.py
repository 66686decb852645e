"""A real proxy in this process: real spool, real PostgreSQL, a scripted model server."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import Result
from sqlalchemy.ext.asyncio import AsyncEngine
from typer.testing import CliRunner
from yarl import URL

from benchmarks.stack import free_port
from pawl.cli import app
from pawl.serving.supervisor import open_sockets
from proxy.ingester.ingester import run_ingester
from proxy.policies.version_file import VersionFile, serving_versions
from proxy.settings import ProxySettings
from proxy.worker import run_worker
from store.read.episodes import read_episodes
from store.records import Episode, TransitionRow
from store.selecting import select_episodes
from store.version_states import ensure_base
from tests.conftest import copy_cluster
from tests.support.servers.fake_upstream import FakeUpstream, fake_upstream
from tests.support.waiting import eventually, until


@dataclass(frozen=True)
class Reply:
    """A response, read to its end."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body, parsed."""
        return json.loads(self.body)


class Proxy:
    """A running proxy and a client's view of it."""

    def __init__(
        self, settings: ProxySettings, engine: AsyncEngine, session: aiohttp.ClientSession
    ) -> None:
        self.settings = settings
        self.engine = engine
        self.session = session
        self.url = f"http://{settings.listen}"
        self.admin = f"http://{settings.admin_listen}"
        self.port = int(settings.listen.rpartition(":")[2])

    async def ask(
        self, method: str, path: str, headers: Any = None, *, data: Any = None, **body: Any
    ) -> Reply:
        """Send `data`, or `body` as JSON, and read the answer; no redirect is followed."""
        url = URL(self.url + path, encoded=True)
        sent = {"json": body or None} if data is None else {"data": data}
        async with self.session.request(
            method, url, headers=headers, allow_redirects=False, **sent
        ) as reply:
            return Reply(reply.status, reply.headers, await reply.read())

    async def chat(self, path: str = "", headers: Any = None, **body: Any) -> Reply:
        """POST a chat call."""
        body = {"model": "m", "messages": [{"role": "user", "content": "q"}]} | body
        return await self.ask("POST", f"{path}/v1/chat/completions", headers, **body)

    async def feedback(self, body: Any, **headers: str) -> tuple[int, Any]:
        """POST feedback; status and parsed body."""
        async with self.session.post(f"{self.url}/feedback", json=body, headers=headers) as reply:
            return reply.status, await reply.json()

    async def episodes(
        self, calls: int, good: Callable[[list[Episode]], object] = bool
    ) -> list[Episode]:
        """All episodes, once so many calls are stored, and they are as wanted."""

        async def look() -> list[Episode]:
            async with self.engine.connect() as connection:
                found = await read_episodes(connection, await select_episodes(connection))
            return found if sum(len(e.calls) for e in found) >= calls and good(found) else []

        return await eventually(look)

    async def only_call(self) -> TransitionRow:
        """The one call that is stored."""
        [episode] = await self.episodes(1)
        [call] = episode.calls
        return call

    async def admin_page(self, path: str, headers: Any = None) -> Reply:
        """GET a page of the admin port."""
        async with self.session.get(self.admin + path, headers=headers) as reply:
            return Reply(reply.status, reply.headers, await reply.read())

    async def counters(self, name: str = "pawl_") -> dict[str, float]:
        """All samples whose name begins so."""
        lines = (await self.admin_page("/metrics")).body.decode().splitlines()
        pairs = [line.rpartition(" ") for line in lines if line.startswith(name)]
        return {sample: float(value) for sample, _, value in pairs}


@asynccontextmanager
async def working(settings: ProxySettings) -> AsyncIterator[None]:
    """A worker in this process."""
    [listener] = open_sockets(settings.listen, 1)
    async with run_worker(settings, listener):
        yield


@asynccontextmanager
async def running(settings: ProxySettings) -> AsyncIterator[None]:
    """An ingester and a worker in this process."""
    async with run_ingester(settings), working(settings):
        yield


@asynccontextmanager
async def proxy_with(settings: ProxySettings, engine: AsyncEngine) -> AsyncIterator[Proxy]:
    """The same, and a client of it; the worker begins once the ingester has read who serves."""
    async with run_ingester(settings):
        file = VersionFile(settings.spool_dir)
        await until(lambda: "m" in serving_versions(file.read() or []))
        async with working(settings), aiohttp.ClientSession() as session:
            yield Proxy(settings, engine, session)


@pytest.fixture
def own_cluster(migrated_cluster: Path, tmp_path: Path) -> None:
    """Copy a migrated cluster for a server of the test's own in `tmp_path`."""
    copy_cluster(migrated_cluster, tmp_path)


@pytest.fixture
async def upstream() -> AsyncIterator[FakeUpstream]:
    async with fake_upstream() as server:
        yield server


def settings_for(database_url: str | None, upstream_url: str, folder: Path) -> ProxySettings:
    """Settings by value; nothing is read from the environment."""
    return ProxySettings.model_validate(
        {
            "DATABASE_URL": database_url,
            "upstream_url": upstream_url,
            "listen": f"127.0.0.1:{free_port()}",
            "admin_listen": f"127.0.0.1:{free_port()}",
            "spool_dir": folder / "spool",
            "data_dir": folder,
            "max_body_mb": 1,
        }
    )


StartProxy = Callable[..., AbstractAsyncContextManager[Proxy]]


@pytest.fixture
def start_proxy(
    database_url: str, engine: AsyncEngine, upstream: FakeUpstream, tmp_path: Path
) -> StartProxy:
    """Start a proxy with some settings of its own; its policy `m` is the base model."""

    @asynccontextmanager
    async def start(**changes: Any) -> AsyncIterator[Proxy]:
        async with engine.begin() as connection:
            await ensure_base(connection, "m")
        settings = settings_for(database_url, upstream.url, tmp_path)
        async with proxy_with(settings.model_copy(update=changes), engine) as made:
            yield made

    return start


@pytest.fixture
async def proxy(start_proxy: StartProxy) -> AsyncIterator[Proxy]:
    async with start_proxy() as made:
        yield made


Pawl = Callable[..., Awaitable[Result]]


@pytest.fixture
def pawl(database_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pawl:
    """Run `pawl` with the test's database, in the test's own folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATABASE_URL", database_url)

    async def run(*arguments: str) -> Result:
        return await asyncio.to_thread(CliRunner().invoke, app, arguments)

    return run


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that trains in milliseconds."""
    from tests.support.training import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("tiny"))
