"""A real proxy in this process: real spool, real PostgreSQL, a scripted model server."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom
from typing import Any

import aiohttp
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.serving.supervisor import listening
from proxy.keeper.keeper import keeping
from proxy.policies.policy_file import WATCH_S
from proxy.settings import ProxySettings
from proxy.worker import serving
from store.read.episodes import episode_ids, read_episodes
from store.records import Episode, TransitionRow
from store.updates.policies import ensure_base
from tests.support.servers.fake_upstream import FakeUpstream, fake_upstream
from tests.support.waiting import eventually

# Below those that Linux gives to outgoing connections: one of them may take what is free now.
PORTS = range(20_000, 32_768)


def free_port() -> int:
    """A port that nothing listens on; by chance, as other workers look for one at the same time."""
    while True:
        # Hypothesis gives `random` the same seed in each worker.
        port = SystemRandom().choice(PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


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

    async def chat(self, path: str = "", headers: Any = None, **body: Any) -> Reply:
        """POST a chat call."""
        body = {"model": "m", "messages": [{"role": "user", "content": "q"}]} | body
        url = f"{self.url}{path}/v1/chat/completions"
        async with self.session.post(url, json=body, headers=headers) as response:
            return Reply(response.status, response.headers, await response.read())

    async def feedback(self, body: Any, **headers: str) -> tuple[int, Any]:
        """POST feedback; status and parsed body."""
        async with self.session.post(f"{self.url}/feedback", json=body, headers=headers) as reply:
            return reply.status, await reply.json()

    async def episodes(self, calls: int) -> list[Episode]:
        """All episodes, once so many calls are stored."""

        async def look() -> list[Episode]:
            async with self.engine.connect() as connection:
                found = await read_episodes(connection, await episode_ids(connection))
            return found if sum(len(e.calls) for e in found) >= calls else []

        return await eventually(look)

    async def only_call(self) -> TransitionRow:
        """The one call that is stored."""
        [episode] = await self.episodes(1)
        [call] = episode.calls
        return call

    async def counters(self) -> dict[str, float]:
        """All samples without labels."""
        async with self.session.get(f"{self.admin}/metrics") as reply:
            lines = (await reply.text()).splitlines()
        pairs = [line.split(" ") for line in lines if not line.startswith("#") and "{" not in line]
        return {name: float(value) for name, value in pairs}

    async def policies_known(self) -> None:
        """Wait until the proxy has read who serves."""

        async def look() -> bool:
            async with self.session.get(f"{self.admin}/readyz") as reply:
                return "m" in (await reply.json())["serving"]

        await eventually(look)
        # The worker reads the file that the keeper wrote a moment later.
        await asyncio.sleep(2 * WATCH_S)


@asynccontextmanager
async def running(settings: ProxySettings) -> AsyncIterator[None]:
    """A keeper and a worker in this process."""
    async with keeping(settings):
        [listener] = listening(settings.listen, 1)
        async with serving(settings, listener):
            yield


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


@pytest.fixture
async def proxy(
    database_url: str, engine: AsyncEngine, upstream: FakeUpstream, tmp_path: Path
) -> AsyncIterator[Proxy]:
    """A proxy whose policy `m` is the base model."""
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
    async with AsyncExitStack() as exits:
        settings = settings_for(database_url, upstream.url, tmp_path)
        await exits.enter_async_context(running(settings))
        session = await exits.enter_async_context(aiohttp.ClientSession())
        found = Proxy(settings, engine, session)
        await found.policies_known()
        yield found


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that trains in milliseconds."""
    from tests.support.training import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("tiny"))
