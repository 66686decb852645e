"""Deleting and keeping for days beside calls, at a proxy whose processes are killed meanwhile."""

import asyncio
import random
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import aiohttp
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from store.database import make_engine
from store.ids import lowest_id_at
from store.write.ingest import Ingester
from tests.integration.deleting.test_delete_command import files_with, pawl
from tests.integration.deleting.test_deleting import body
from tests.support.faults.ledger import Scrapes, drained
from tests.support.faults.load import BROKEN, fetch
from tests.support.faults.stand import Part, Stand, running_stand
from tests.support.ledger.deleting import exported, places_with
from tests.support.records import call
from tests.support.servers.fake_upstream import FakeUpstream, fake_upstream
from tests.support.waiting import eventually

# Many starts of processes, on a machine that others slow down.
pytestmark = pytest.mark.timeout(900)

OLD = 450
CALLERS = 4
KILLS: tuple[Part, ...] = ("ingester", "worker", "supervisor", "ingester")
LONG_S = 300.0
ANSWERED = 200


@pytest.fixture
async def upstream() -> AsyncIterator[FakeUpstream]:
    async with fake_upstream() as server:
        yield server


@pytest.fixture
async def stand(
    upstream: FakeUpstream, tmp_path: Path, own_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Stand]:
    """Two workers that keep records for two days."""
    monkeypatch.setenv("PAWL_KEEP_DAYS", "2")
    async with running_stand(tmp_path, upstream.url, 2) as found:
        yield found


async def store_old(engine: AsyncEngine) -> None:
    """Store episodes of nine days ago."""
    began = datetime.now(UTC) - timedelta(days=9)
    first = lowest_id_at(began).int
    for at in range(0, OLD, 50):
        records = [
            call(
                f"old/{number}",
                id=UUID(int=first + number),
                started_at=began,
                request=body(f"canary old/{number} "),
            )
            for number in range(at, at + 50)
        ]
        await Ingester().store(engine, records)


class Caller:
    """A client that calls on in two kinds of episodes, whatever happens to the proxy."""

    def __init__(self, stand: Stand, seed: int) -> None:
        self._stand = stand
        self._url = f"http://127.0.0.1:{stand.port}/v1/chat/completions"
        self._dice = random.Random(seed)
        self.seed = seed
        self.kept: list[str] = []

    async def run(self, done: asyncio.Event) -> None:
        """Call until `done`, and note which calls were answered of episodes that are kept."""
        while not done.is_set():
            kind = self._dice.choice(("gone", "kept"))
            key = f"{kind}/{self.seed}-{self._dice.randrange(20)}"
            said = [{"role": "user", "content": f"canary {key} {self._dice.random()}"}]
            try:
                async with (
                    aiohttp.ClientSession() as session,
                    session.post(
                        self._url,
                        json={"model": "m", "messages": said},
                        headers={"x-pawl-episode": key},
                    ) as reply,
                ):
                    await reply.read()
                    if reply.status == ANSWERED and kind == "kept":
                        self.kept.append(reply.headers["x-pawl-call"])
            except (aiohttp.ClientError, OSError):
                # The proxy is being killed: what had no answer is nobody's to find.
                await eventually(self._reached, within_s=LONG_S)

    async def _reached(self) -> bool:
        try:
            return (await fetch(self._stand.port, "/v1/models")).status == ANSWERED
        except BROKEN:
            return False


async def left_of_old(engine: AsyncEngine) -> int:
    async with engine.connect() as connection:
        query = text("SELECT count(*) FROM episodes WHERE key LIKE 'old/%'")
        return int(await connection.scalar(query) or 0)


async def deleted_and_killed(stand: Stand, dice: random.Random) -> None:
    """Begin to delete what is to go, and kill the command."""
    process = pawl(stand.url, stand.spool, ["--prefix", "gone/", "--json"])
    assert process.stdout is not None
    for _ in range(dice.randrange(1, 6)):
        await asyncio.to_thread(process.stdout.readline)
    process.kill()
    await asyncio.to_thread(process.communicate)


async def test_process_kills_leave_no_trace_of_deleted_episodes_and_lose_no_other_call(
    stand: Stand,
) -> None:
    dice, done = random.Random(1), asyncio.Event()
    engine = make_engine(stand.url)
    await store_old(engine)
    assert await places_with(engine, "canary old/") != []
    callers = [Caller(stand, seed) for seed in range(CALLERS)]
    calling = asyncio.gather(*[caller.run(done) for caller in callers])
    for victim in KILLS:
        await deleted_and_killed(stand, dice)
        await stand.kill(victim, dice.randrange(2))

    async def begun() -> bool:
        return await left_of_old(engine) < OLD

    # The ingester removes what is old 200 at a time, some seconds after its start: it is killed
    # then.
    await eventually(begun, within_s=LONG_S)
    await stand.kill("ingester", 0)
    done.set()
    await calling
    assert await drained(stand.admin, Scrapes(), within_s=LONG_S) is not None
    ended = pawl(stand.url, stand.spool, ["--prefix", "gone/", "--json"])
    _, err = await asyncio.to_thread(ended.communicate)
    assert ended.returncode == 0, err

    async def removed() -> bool:
        # Their calls go with their day, some moments after the episodes.
        return await left_of_old(engine) == 0 and not await places_with(engine, "canary old/")

    await eventually(removed, within_s=LONG_S)
    found = await exported(engine)
    calls = [one["call"] for line in found.values() for one in line["calls"]]
    kept = {one for caller in callers for one in caller.kept}
    assert kept
    assert kept <= set(calls)
    assert len(calls) == len(set(calls))
    assert {key.partition("/")[0] for key in found} == {"kept"}
    for word in ("canary gone/", "gone/", "canary old/"):
        assert await places_with(engine, word) == []
        assert files_with(stand.spool, word) == []
    await engine.dispose()
