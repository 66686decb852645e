"""Revision 0031: an event of a version is neither changed nor deleted, up and down."""

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from store.connection.engine import make_engine
from store.schema.migrate import check, downgrade, upgrade
from store.updates.policies import promote
from tests.support.ledger.lineage import trained

BEFORE = "0030"
CHANGE = "UPDATE policy_events SET reason = 'another' WHERE version = 1"
DELETE = "DELETE FROM policy_events WHERE version = 1"
REASONS = text("SELECT reason FROM policy_events WHERE version = 1 AND to_state = 'serving'")


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

    await downgrade(url, BEFORE)
    async with engine.begin() as connection:
        await connection.execute(text(CHANGE))
        assert await connection.scalar(REASONS) == "another"
    await engine.dispose()

    await upgrade(url)
    with pytest.raises(IntegrityError):
        async with engine.begin() as connection:
            await connection.execute(text(DELETE))
    await engine.dispose()
