"""A version is promoted while an episode's first call is under way: its other calls keep to it.

Nothing but the workers' shared page can know: no call of the episode is stored yet.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from store.database import make_engine
from store.version_states import ensure_base
from tests.support.faults.stand import Stand, running_stand
from tests.support.ledger.lineage import add_in_state, promote
from tests.support.servers.fake_upstream import FakeUpstream
from tests.support.waiting import eventually, until

BODY = {"model": "m", "messages": [{"role": "user", "content": "q"}], "stream": True}
# The kernel gives each new connection to one of the workers: one in 2^24 gives all to one.
TIMES = 24


@pytest.fixture(params=[1, 2])
async def stand(
    upstream: FakeUpstream, tmp_path: Path, own_cluster: None, request: pytest.FixtureRequest
) -> AsyncIterator[Stand]:
    """`pawl proxy` with one worker or two, and a policy `m`."""
    async with running_stand(tmp_path, upstream.url, request.param) as made:
        yield made


@pytest.fixture
async def ledger(stand: Stand) -> AsyncIterator[AsyncEngine]:
    engine = make_engine(stand.url)
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
    yield engine
    await engine.dispose()


async def version_of(stand: Stand, episode: str) -> str | None:
    """Of one more call, on a connection of its own, once it has ended."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"http://127.0.0.1:{stand.port}/v1/chat/completions",
            json=BODY,
            headers={"x-pawl-episode": episode},
        ) as reply,
    ):
        await reply.read()
        assert reply.status == 200
        return reply.headers.get("x-pawl-policy")


def serves(stand: Stand, wanted: str) -> Callable[[], Awaitable[bool]]:
    """Whether all workers give new episodes a version."""

    async def all_do() -> bool:
        asked = (version_of(stand, os.urandom(8).hex()) for _ in range(TIMES))
        return {await one for one in asked} == {wanted}

    return all_do


async def promoted(ledger: AsyncEngine) -> None:
    async with ledger.begin() as connection:
        await add_in_state(connection, "m", 1, "retired")
    async with ledger.begin() as connection:
        await promote(connection, "m", 1)


async def replaced(stand: Stand) -> None:
    """Have the only worker replaced (SIGHUP); it goes on with its call."""
    [old] = stand.processes("worker")
    stand.supervisor.send_signal(signal.SIGHUP)

    async def has_left() -> bool:
        return len(stand.processes("worker")) > 1 and stand.is_leaving(old)

    await eventually(has_left)


async def test_episode_keeps_its_version_across_workers(
    stand: Stand, ledger: AsyncEngine, upstream: FakeUpstream
) -> None:
    await eventually(serves(stand, "m@0"))
    go_on = upstream.hold_streams()
    asked = len(upstream.requests)
    first = asyncio.create_task(version_of(stand, "parallel"))
    await until(lambda: len(upstream.requests) > asked)
    upstream.behave = None
    if stand.workers == 1:
        await replaced(stand)
    await promoted(ledger)
    await eventually(serves(stand, "m@1"))
    later = {await version_of(stand, "parallel") for _ in range(TIMES)}
    assert not first.done()
    go_on.set()
    assert {await first, *later} == {"m@0"}
