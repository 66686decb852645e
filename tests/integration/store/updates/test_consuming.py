"""Ending an update, and consuming episodes: once each, and never without a reason."""

from uuid import UUID

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine

from store import claims
from store.claims import consume_episodes, end_update
from store.errors import ClaimLost
from store.ready import ClaimRule
from store.write.ingest import Ingester
from tests.support.records import call, reward

RULE = ClaimRule(policy="m", group_size=1, groups=3, smallest_group=1, max_age_s=1e9)


@pytest.fixture
async def claimed(engine: AsyncEngine) -> tuple[UUID, list[UUID]]:
    """A running update, and the ids of the three episodes that it claimed."""
    records = [[call(f"e{n}"), reward(1.0, episode=f"e{n}")] for n in range(3)]
    await Ingester().store(engine, [record for pair in records for record in pair])
    async with engine.begin() as connection:
        update_id = await claims.claim(connection, RULE, 0, {})
        assert update_id is not None
        rows = await connection.execute(text("SELECT id FROM episodes ORDER BY key"))
        return update_id, list(rows.scalars())


async def consumed(engine: AsyncEngine) -> list[tuple[UUID, UUID, bool, str | None]]:
    query = text("SELECT episode_id, update_id, trained, reason FROM consumptions")
    async with engine.connect() as connection:
        return sorted((row[0], row[1], row[2], row[3]) for row in await connection.execute(query))


async def test_each_episode_is_consumed_with_its_outcome(
    engine: AsyncEngine, claimed: tuple[UUID, list[UUID]]
) -> None:
    update_id, [one, other, last] = claimed
    outcomes = [(other, False, "alone"), (one, True, None), (last, False, "no_spread")]
    async with engine.begin() as connection:
        await consume_episodes(connection, update_id, outcomes)
        await consume_episodes(connection, update_id, [])
    assert await consumed(engine) == sorted((e, update_id, t, why) for e, t, why in outcomes)


async def test_of_refused_outcomes_none_is_stored(
    engine: AsyncEngine, claimed: tuple[UUID, list[UUID]]
) -> None:
    update_id, [one, other, _] = claimed
    without_reason = [(one, True, None), (other, False, None)]
    twice = [(one, True, None), (other, True, None), (one, False, "alone")]
    for outcomes in (without_reason, twice):
        with pytest.raises(IntegrityError):
            async with engine.begin() as connection:
                await consume_episodes(connection, update_id, outcomes)
    assert await consumed(engine) == []


async def test_an_update_ends_once(engine: AsyncEngine, claimed: tuple[UUID, list[UUID]]) -> None:
    update_id, _ = claimed
    async with engine.begin() as connection:
        await end_update(connection, update_id, "abandoned", {"abandoned": "why"})
    with pytest.raises(ClaimLost):
        async with engine.begin() as connection:
            await end_update(connection, update_id, "done", {}, version=1)
    async with engine.connect() as connection:
        [update] = await claims.list_updates(connection)
    assert (update.state, update.version, update.metrics) == (
        "abandoned",
        None,
        {"abandoned": "why"},
    )
    assert update.finished_at is not None
