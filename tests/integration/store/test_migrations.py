"""The one revision: up, down, no drift from the tables, and events that PostgreSQL keeps."""

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from store.database import make_engine
from store.schema.migrate import check, downgrade, upgrade
from tests.support.ledger.lineage import promote, trained


async def tables(url: str) -> set[str]:
    engine = make_engine(url)
    async with engine.connect() as connection:
        rows = await connection.execute(
            text("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        )
        names = set(rows.scalars())
    await engine.dispose()
    return names


async def test_up_and_down_and_up_again(empty_database_url: str) -> None:
    await upgrade(empty_database_url)
    made = await tables(empty_database_url)
    assert {"transitions", "episodes", "tool_events", "feedback", "policies"} <= made
    assert {"updates", "consumptions", "links", "api_keys"} <= made
    await downgrade(empty_database_url, "base")
    assert await tables(empty_database_url) == {"alembic_version"}
    await upgrade(empty_database_url)
    assert await tables(empty_database_url) == made


async def test_tables_and_migrations_do_not_differ(database_url: str) -> None:
    await check(database_url)
    assert "transitions" in await tables(database_url)


async def test_migrating_twice_changes_nothing(database_url: str) -> None:
    before = await tables(database_url)
    await upgrade(database_url)
    assert await tables(database_url) == before


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE policy_events SET reason = 'another' WHERE version = 1",
        "DELETE FROM policy_events WHERE version = 1",
    ],
)
async def test_event_can_neither_be_changed_nor_deleted(database_url: str, statement: str) -> None:
    engine = make_engine(database_url)
    async with engine.begin() as connection:
        await trained(connection, 0)
        await promote(connection, "m", 1, reason="for the test", actor="operator")
    with pytest.raises(IntegrityError, match="policy_events are only added: the event"):
        async with engine.begin() as connection:
            await connection.execute(text(statement))
    await engine.dispose()
