"""The one migration path: up, down, and no drift between tables and migrations."""

from sqlalchemy import text

from store.engine import make_engine
from store.migrate import check, downgrade, upgrade


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
    assert {"updates", "consumptions", "api_keys"} <= made
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
