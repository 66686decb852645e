"""Versions that go live together, and what waits for whose turn it is."""

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from store.claims import begin_update
from store.ready import ClaimRule, waiting_updates
from store.version_queries import list_versions
from store.version_states import add_version, ensure_base, make_ready, promote_together
from store.write.ingest import ingest
from tests.support.records import call, reward

BOTH = ("checker", "writer")
FOR_EVER = 1e9


@pytest.fixture
async def written(engine: AsyncEngine) -> AsyncEngine:
    """Two policies, each with a version that is written."""
    async with engine.begin() as connection:
        for name in BOTH:
            await ensure_base(connection, name, "m")
            update = await begin_update(connection, name, 0, {})
            await add_version(connection, name, 1, f"/{name}/1", update)
    return engine


async def serving(connection: AsyncConnection) -> dict[str, int]:
    return {v.name: v.version for v in await list_versions(connection) if v.state == "serving"}


async def test_who_looks_sees_both_old_or_both_new(written: AsyncEngine) -> None:
    async with written.begin() as connection:
        await make_ready(connection, "writer", 1, reason="for the test", actor="operator")
        assert await promote_together(connection, BOTH, FOR_EVER) == []
    async with written.connect() as looking:
        async with written.begin() as connection:
            await make_ready(connection, "checker", 1, reason="for the test", actor="operator")
            promoted = await promote_together(connection, BOTH, FOR_EVER)
            assert [v.served_name for v in promoted] == ["checker@1", "writer@1"]
            assert await serving(looking) == {"checker": 0, "writer": 0}
        assert await serving(looking) == {"checker": 1, "writer": 1}


async def test_two_trainers_that_are_at_it_at_once_leave_it_to_the_next_look(
    written: AsyncEngine,
) -> None:
    async with written.connect() as one, written.connect() as other:
        for connection, name in ((one, "writer"), (other, "checker")):
            await make_ready(connection, name, 1, reason="for the test", actor="operator")
            assert await promote_together(connection, BOTH, FOR_EVER) == []
        await one.commit()
        await other.commit()
    async with written.begin() as connection:
        assert len(await promote_together(connection, BOTH, FOR_EVER)) == 2
        assert await serving(connection) == {"checker": 1, "writer": 1}


async def test_a_newer_version_takes_the_place_of_one_that_waits(written: AsyncEngine) -> None:
    async with written.begin() as connection:
        await make_ready(connection, "writer", 1, reason="for the test", actor="operator")
        await connection.exec_driver_sql("UPDATE updates SET state = 'done'")
        update = await begin_update(connection, "writer", 0, {})
        await add_version(connection, "writer", 2, "/writer/2", update)
        await make_ready(connection, "writer", 2, reason="for the test", actor="operator")
        states = {v.version: v.state for v in await list_versions(connection, "writer")}
    assert states == {0: "serving", 1: "retired", 2: "ready"}


@pytest.mark.parametrize(("group_size", "groups", "updates"), [(2, 1, 5), (2, 2, 2.5), (3, 1, 3)])
async def test_whole_groups_alone_count_as_waiting(
    engine: AsyncEngine, group_size: int, groups: int, updates: float
) -> None:
    """Tasks of 4, 3 and 1 scored episodes, and one of 5 that nobody named; others do not count."""
    records = []
    for number, task in enumerate(["a"] * 4 + ["b"] * 3 + ["c"] + [None] * 5):
        records += [call(f"e{number}", task=task), reward(1.0, episode=f"e{number}")]
    records += [call(f"open{number}", task="a") for number in range(9)]
    for number in range(9):
        records += [call(f"o{number}", task="a", policy="other"), reward(1.0, episode=f"o{number}")]
    rule = ClaimRule(
        policy="m", group_size=group_size, groups=groups, smallest_group=1, max_age_s=1.0
    )
    async with engine.begin() as connection:
        await ingest(connection, records)
        assert await waiting_updates(connection, rule) == updates


async def test_without_groups_every_scored_episode_counts(engine: AsyncEngine) -> None:
    rule = ClaimRule(policy="m", group_size=1, groups=4, smallest_group=1, max_age_s=1.0)
    async with engine.begin() as connection:
        assert await waiting_updates(connection, rule) == 0
        for number, task in enumerate(["a", "a", None, None, None, "b"]):
            made = [call(f"e{number}", task=task), reward(1.0, episode=f"e{number}")]
            await ingest(connection, made)
        assert await waiting_updates(connection, rule) == 1.5
