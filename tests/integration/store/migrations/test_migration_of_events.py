"""Revisions 0026 and 0031: versions that are tried or rolled back, their events, up and down."""

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from store.connection.engine import make_engine
from store.read.events import list_events
from store.schema.migrate import check, downgrade, upgrade
from store.updates.gating import begin_canary, freeze, make_candidate, roll_back
from store.updates.policies import list_versions, numbered_version, promote
from store.write.ingest import ingest
from tests.support.ledger.lineage import trained
from tests.support.records import call

BEFORE = "0025"
BEFORE_THEY_STAY = "0030"
CHANGE = "UPDATE policy_events SET reason = 'another' WHERE version = 1"
DELETE = "DELETE FROM policy_events WHERE version = 1"
REASONS = text("SELECT reason FROM policy_events WHERE version = 1 AND to_state = 'serving'")
STATES = text("SELECT version, state FROM policies ORDER BY version")
AFTER = {0: "published", 1: "serving", 2: "retired", 3: "retired", 4: "written", 5: "written"}


async def fill(connection: AsyncConnection) -> None:
    """Version 1 serves, 2 was rolled back, 3 is tried, and 4 waits for that."""
    await trained(connection, 0, 1, 1, 1, 4)
    await promote(connection, "m", 1, reason="for the test", actor="trainer")
    for number in (2, 3, 4):
        await make_candidate(connection, "m", number, {"margin": 0.02}, reason="for the test")
        made = await numbered_version(connection, "m", number)
        assert made is not None
        if number < 4:
            await begin_canary(connection, made, 0.1, 0.02, reason="for the test", actor="steward")
        if number == 2:
            tried = await numbered_version(connection, "m", number)
            assert tried is not None
            await roll_back(
                connection, tried, reason="worse", actor="steward", evidence={"upper": -0.1}
            )
    await freeze(connection, "m", frozen=True, reason="for the test", actor="operator")
    await ingest(connection, [call("e", policy_version=3, arm="canary")])


async def test_what_is_tried_or_was_rolled_back_gets_no_traffic_from_an_older_program(
    empty_database_url: str,
) -> None:
    url = empty_database_url
    await upgrade(url)
    engine = make_engine(url)
    async with engine.begin() as connection:
        await fill(connection)
        assert len(await list_events(connection, "m", 2)) == 4
    await engine.dispose()
    await check(url)

    await downgrade(url, BEFORE)
    async with engine.connect() as connection:
        assert dict(map(tuple, await connection.execute(STATES))) == AFTER
    await engine.dispose()

    await upgrade(url)
    await check(url)
    async with engine.begin() as connection:
        versions = await list_versions(connection, "m")
        assert {one.version: one.state for one in versions} == AFTER
        assert not any(one.rolled_back or one.share is not None for one in versions)
        # What happened before is not made up; what happens from now on is told.
        assert await list_events(connection, "m") == []
        await promote(connection, "m", 4, reason="it is better", actor="operator")
        newest = (await list_events(connection, "m", 4))[0]
        assert (newest.from_state, newest.to_state) == ("written", "serving")
        assert await connection.scalar(text("SELECT count(*) FROM transitions")) == 1
    await engine.dispose()


async def test_events_stay_as_they_are(empty_database_url: str) -> None:
    url = empty_database_url
    await upgrade(url)
    await check(url)
    engine = make_engine(url)
    async with engine.begin() as connection:
        await trained(connection, 0)
        await promote(connection, "m", 1, reason="for the test", actor="operator")
    for statement in (CHANGE, DELETE):
        with pytest.raises(IntegrityError, match="policy_events are only added: the event"):
            async with engine.begin() as connection:
                await connection.execute(text(statement))
    async with engine.connect() as connection:
        assert await connection.scalar(REASONS) == "for the test"
    await engine.dispose()

    await downgrade(url, BEFORE_THEY_STAY)
    async with engine.begin() as connection:
        await connection.execute(text(CHANGE))
        assert await connection.scalar(REASONS) == "another"
    await engine.dispose()

    await upgrade(url)
    with pytest.raises(IntegrityError):
        async with engine.begin() as connection:
            await connection.execute(text(DELETE))
    await engine.dispose()
