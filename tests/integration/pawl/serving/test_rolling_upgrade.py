"""Two proxies behind a load balancer are upgraded by turns, across a revision of the schema."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Final

import aiohttp
from aiohttp import web
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from benchmarks.stack import free_port
from tests.conftest import ROOT
from tests.support.ledger.newer_schema import REVISION, newer_migrations
from tests.support.servers.fake_upstream import DONE, FakeUpstream, stream_chunks
from tests.support.waiting import eventually, until

CLIENTS: Final = 16
# Pieces of a stream, and the pause before each.
PIECES: Final = 12
PIECE_S: Final = 0.05
LOOK_S: Final = 0.1
DELAY_S: Final = "1.5"


class OneProxy:
    """`pawl proxy`, of this version, or of the newer one."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.port, self.admin = free_port(), free_port()
        self.log = folder / "log"
        folder.mkdir()
        self._environment = {
            **environment,
            "PAWL_LISTEN": f"127.0.0.1:{self.port}",
            "PAWL_ADMIN_LISTEN": f"127.0.0.1:{self.admin}",
            "PAWL_SPOOL_DIR": str(folder / "spool"),
        }
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, newer: Path | None = None) -> None:
        """Start it, from the folder `newer` if given; return once calls and database work."""
        with self.log.open("ab") as log:
            self._process = await pawl(self._environment, newer, "proxy", log=log)
        await eventually(self._is_up)

    async def _is_up(self) -> bool:
        _, ready = await asked(f"http://127.0.0.1:{self.admin}/readyz")
        return '"database": "up"' in ready and await is_well(self.port)

    async def stop(self) -> None:
        """Stop it by SIGTERM, as an orchestrator does."""
        assert self._process is not None
        self._process.terminate()
        assert await self._process.wait() == 0


async def pawl(
    environment: Mapping[str, str], newer: Path | None, *command: str, log: object = None
) -> asyncio.subprocess.Process:
    path = os.pathsep.join(map(str, filter(None, (newer, ROOT))))
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "pawl.cli", *command),
        env={"PATH": os.environ["PATH"], **environment, "PYTHONPATH": path},
        stderr=log,  # type: ignore[arg-type]
    )


async def asked(url: str) -> tuple[int, str]:
    """Return status and body; 0 if nobody listens."""
    with suppress(aiohttp.ClientError):
        async with aiohttp.ClientSession() as session, session.get(url) as reply:
            return reply.status, await reply.text()
    return 0, ""


async def is_well(port: int) -> bool:
    return (await asked(f"http://127.0.0.1:{port}/healthz"))[0] == 200


class Balancer:
    """Give each connection to the next of the proxies whose `/healthz` is well."""

    def __init__(self, ports: list[int]) -> None:
        self.url = ""
        self.well: list[int] = []
        self._turn = count()
        self._ports = ports

    async def look(self) -> None:
        """Ask each for its health, again and again."""
        while True:
            self.well = [port for port in self._ports if await is_well(port)]
            await asyncio.sleep(LOOK_S)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass a connection on."""
        port = self.well[next(self._turn) % len(self.well)]
        there = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(relay(reader, there[1]), relay(there[0], writer))


async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def balanced(*proxies: OneProxy) -> AsyncIterator[Balancer]:
    balancer = Balancer([proxy.port for proxy in proxies])
    looking = asyncio.create_task(balancer.look())
    async with await asyncio.start_server(balancer.serve, "127.0.0.1", 0) as server:
        balancer.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await until(lambda: len(balancer.well) == len(proxies))
        yield balancer
    looking.cancel()


class Clients:
    """Stream all the time, and give each call a reward."""

    def __init__(self, url: str) -> None:
        self.answered: list[str] = []
        self.failed: list[str] = []
        self._url, self._ending = url, False

    async def client(self) -> None:
        """Ask on connections that are kept, one call after another."""
        async with aiohttp.ClientSession() as session:
            while not self._ending:
                try:
                    await self._call(session)
                except (aiohttp.ClientError, OSError, AssertionError) as error:
                    self.failed.append(f"{type(error).__name__}: {error}")

    async def _call(self, session: aiohttp.ClientSession) -> None:
        message = {"role": "user", "content": f"question {len(self.answered)}"}
        body = {"model": "m", "messages": [message], "stream": True}
        async with session.post(f"{self._url}/v1/chat/completions", json=body) as reply:
            streamed = await reply.text()
            assert (reply.status, streamed[-14:]) == (200, "data: [DONE]\n\n"), streamed
            call = reply.headers["x-pawl-call"]
        reward = {"value": 0.5, "call": call}
        async with session.post(f"{self._url}/feedback", json=reward) as reply:
            assert reply.status in (200, 202), await reply.text()
        self.answered.append(call)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Ask during the block, and end the calls under way after it."""
        clients = [asyncio.create_task(self.client()) for _ in range(CLIENTS)]
        yield
        self._ending = True
        await asyncio.gather(*clients)

    async def more(self, calls: int) -> None:
        """Wait until so many more are answered."""
        wanted = len(self.answered) + calls
        await until(lambda: len(self.answered) >= wanted)


async def slowly(request: web.Request) -> web.StreamResponse:
    """Stream as a model does: a piece at a time."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    head, middle, last = stream_chunks(json.loads(await request.read()), id(request))
    for piece in (head, *[middle] * PIECES, last, DONE):
        await asyncio.sleep(PIECE_S)
        await response.write(piece)
    return response


async def test_proxies_are_upgraded_by_turns_without_a_failed_or_lost_call(
    database_url: str, engine: AsyncEngine, upstream: FakeUpstream, tmp_path: Path
) -> None:
    upstream.behave = slowly
    # Whatever imports from there first is of the newer version.
    newer = newer_migrations(tmp_path / "newer").parent
    environment = {
        "DATABASE_URL": database_url,
        "PAWL_UPSTREAM_URL": upstream.url,
        "PAWL_DRAIN_DELAY_S": DELAY_S,
    }
    one, other = (OneProxy(tmp_path / name, environment) for name in ("one", "other"))
    await asyncio.gather(one.start(), other.start())
    async with balanced(one, other) as balancer:
        clients = Clients(balancer.url)
        async with clients.running():
            await clients.more(2 * CLIENTS)
            migrating = await pawl(environment, newer, "migrate")
            assert await migrating.wait() == 0
            await clients.more(2 * CLIENTS)
            # One of this version is started anew beside the newer schema, as by a machine's end.
            for proxy, to in ((one, newer), (other, None), (other, newer)):
                await proxy.stop()
                await proxy.start(to)
                await clients.more(2 * CLIENTS)
    await asyncio.gather(one.stop(), other.stop())
    assert clients.failed == []
    async with engine.connect() as connection:
        revision = await connection.scalar(text("SELECT version_num FROM alembic_version"))
        calls = await connection.execute(text("SELECT CAST(id AS text) FROM transitions"))
        rewards = await connection.execute(
            text("SELECT CAST(call_id AS text) FROM feedback WHERE value = 0.5")
        )
    assert revision == REVISION
    answered = sorted(clients.answered)
    assert (sorted(calls.scalars()), sorted(rewards.scalars())) == (answered, answered)
