"""Arms through the proxy: what a new episode is given, what is stored of it, and what stays."""

from collections.abc import AsyncIterator
from typing import Final

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.policies.versions import arms_of
from store.records import ARMS
from store.version_queries import list_servable, numbered_version
from store.version_states import begin_canary, roll_back
from tests.integration.conftest import Proxy, StartProxy
from tests.support.ledger.lineage import TEST, load, promote, trained
from tests.support.waiting import eventually

STORED = text(
    "SELECT e.key, t.policy_version, t.arm FROM transitions t JOIN episodes e"
    " ON e.id = t.episode_id"
)
EPISODES: Final = [f"e{number}" for number in range(24)]


@pytest.fixture
async def trying(engine: AsyncEngine, start_proxy: StartProxy) -> AsyncIterator[Proxy]:
    """A proxy whose version 1 serves; 2 is tried on a third, and a third stays with the base."""
    async with engine.begin() as connection:
        await trained(connection, 0, 1)
        await promote(connection, "m", 1, rule={"control_share": 0.33})
        await load(connection, "m", 2, {}, reason=TEST, actor="trainer")
        made = await numbered_version(connection, "m", 2)
        assert made is not None
        await begin_canary(connection, made, 0.34, reason=TEST, actor="controller")
    async with start_proxy() as proxy:
        yield proxy


async def served(proxy: Proxy, path: str, **body: str) -> str:
    reply = await proxy.chat(path, **body)
    assert reply.status == 200
    return reply.headers["x-pawl-policy"]


async def test_each_call_is_stored_with_the_arm_that_its_episode_was_given(
    trying: Proxy,
) -> None:
    async with trying.engine.connect() as connection:
        arms = arms_of(await list_servable(connection, "m"))["m"]
    given = {one: arms.arm_of_new_episode(one) for one in EPISODES}
    assert set(given.values()) == set(ARMS)
    for one in EPISODES:
        assert await served(trying, f"/episode/{one}") == f"m@{arms.version_of(given[one])}"
    # Neither evaluation nor a version that is asked for by its name is left to chance.
    for one in range(8):
        assert await served(trying, f"/episode/measured-{one}/split/eval") == "m@1"
        assert await served(trying, f"/episode/named-{one}", model="m@2") == "m@2"
    await trying.episodes(len(EPISODES) + 16)
    async with trying.engine.connect() as connection:
        stored = {
            row.key: (row.policy_version, row.arm) for row in await connection.execute(STORED)
        }
    assert {one: stored[one] for one in EPISODES} == {
        one: (arms.version_of(arm), arm) for one, arm in given.items()
    }
    others = {stored[one] for one in stored if one not in given}
    assert others == {(1, None), (2, None)}


async def test_rolled_back_canary_keeps_its_episodes_and_gets_no_new_episode(
    trying: Proxy,
) -> None:
    before = {one: await served(trying, f"/episode/{one}") for one in EPISODES}
    assert set(before.values()) == {"m@0", "m@1", "m@2"}
    async with trying.engine.begin() as connection:
        tried = await numbered_version(connection, "m", 2)
        assert tried is not None
        await roll_back(connection, tried, reason="worse", actor="controller")
    new = iter(range(10**6))

    async def known() -> bool:
        got = {await served(trying, f"/episode/new-{next(new)}") for _ in range(24)}
        return got == {"m@0", "m@1"}

    await eventually(known)
    assert {one: await served(trying, f"/episode/{one}") for one in EPISODES} == before
