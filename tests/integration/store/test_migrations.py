"""The one revision: up, down, newer ones, and events that stay."""

import asyncio
import json
import re
from pathlib import Path

import aiohttp
import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine

from store.database import make_engine
from store.errors import NewerSchema, StoreError
from store.schema import migrate
from store.schema.migrate import downgrade, upgrade
from store.schema.tables import metadata
from tests.integration.conftest import running, settings_for
from tests.support.ledger.lineage import promote, trained
from tests.support.ledger.newer_schema import newer_migrations
from tests.support.waiting import eventually


async def tables(url: str) -> set[str]:
    engine = make_engine(url)
    async with engine.connect() as connection:
        rows = await connection.execute(
            text("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        )
        names = set(rows.scalars())
    await engine.dispose()
    return names


async def test_schema_has_the_same_tables_after_up_down_and_up(empty_database_url: str) -> None:
    await upgrade(empty_database_url)
    made = await tables(empty_database_url)
    assert {"transitions", "episodes", "tool_events", "feedback", "policies"} <= made
    assert {"updates", "consumptions", "links", "api_keys"} <= made
    await downgrade(empty_database_url, "base")
    assert await tables(empty_database_url) == {"alembic_version"}
    await upgrade(empty_database_url)
    assert await tables(empty_database_url) == made


async def test_migrating_twice_changes_nothing(database_url: str) -> None:
    before = await tables(database_url)
    await upgrade(database_url)
    assert await tables(database_url) == before


async def note_revision(url: str, revision: str) -> None:
    """Note a revision as a newer version of Pawl does."""
    engine = make_engine(url)
    async with engine.begin() as connection:
        await connection.execute(
            text("UPDATE alembic_version SET version_num = :revision"), {"revision": revision}
        )
    await engine.dispose()


async def noted_revision(url: str) -> str:
    engine = make_engine(url)
    async with engine.connect() as connection:
        revision = await connection.scalar(text("SELECT version_num FROM alembic_version"))
    await engine.dispose()
    return str(revision)


@pytest.mark.parametrize("revision", ["0002_serves_0001", "0010_serves_0001"])
async def test_newer_schema_that_supports_this_version_of_pawl_is_used(
    database_url: str, revision: str
) -> None:
    await note_revision(database_url, revision)
    await upgrade(database_url)
    assert await noted_revision(database_url) == revision


@pytest.mark.parametrize("revision", ["0002", "0003_serves_0002", "of_a_fork"])
async def test_newer_schema_that_does_not_support_this_version_of_pawl_is_refused(
    database_url: str, revision: str
) -> None:
    await note_revision(database_url, revision)
    remedy = re.escape("install the version that made it, or downgrade with that one")
    with pytest.raises(NewerSchema, match=f"has the schema {revision}, .*{remedy}"):
        await upgrade(database_url)


async def test_newer_schema_is_downgraded_by_the_newer_version_only(database_url: str) -> None:
    await note_revision(database_url, "0002_serves_0001")
    with pytest.raises(NewerSchema, match="by `pawl migrate --down 0001`"):
        await downgrade(database_url, "0001")


async def test_migration_that_meets_a_deadlock_is_tried_again(
    database_url: str, engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = newer_migrations(tmp_path)
    monkeypatch.setattr(migrate, "files", lambda _: newer)
    first, *_, last = metadata.tables
    async with engine.connect() as other, engine.connect() as looking:
        # It has the patience, so the migration is the one that PostgreSQL ends.
        await other.execute(text("SET LOCAL deadlock_timeout = '60s'"))
        await other.execute(text(f"SELECT FROM {last}"))
        migrating = asyncio.create_task(upgrade(database_url))

        async def waits() -> bool:
            query = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation IS NOT NULL"
            return bool(await looking.scalar(text(query)))

        await eventually(waits)
        await other.execute(text(f"SELECT FROM {first}"))
        await other.rollback()
    await migrating
    assert await noted_revision(database_url) == "0002_serves_0001"
    await downgrade(database_url, "0001")


async def test_unknown_revision_is_refused_by_name(database_url: str) -> None:
    with pytest.raises(StoreError, match="'0009'"):
        await upgrade(database_url, "0009")


async def test_proxy_older_than_the_database_schema_spools_records_and_says_why(
    database_url: str, tmp_path: Path
) -> None:
    await note_revision(database_url, "0002")
    settings = settings_for(database_url, "http://127.0.0.1:9/v1", tmp_path)
    async with running(settings), aiohttp.ClientSession() as session:

        async def says_why() -> bool:
            async with session.get(f"http://{settings.admin_listen}/readyz") as reply:
                ready = json.loads(await reply.read())
            refuses = ready["database"] == "refuses us (NewerSchema): records wait on disk"
            return refuses and ready["status"] == "degraded"

        await eventually(says_why)
        said = {"metric": "reward", "value": 1.0, "episode": "e"}
        async with session.post(f"http://{settings.listen}/feedback", json=said) as reply:
            assert reply.status == 202

        async def spooled() -> bool:
            async with session.get(f"http://{settings.admin_listen}/metrics") as reply:
                return "\npawl_records_spooled 1.0" in await reply.text()

        await eventually(spooled)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE policy_events SET reason = 'another' WHERE version = 1",
        "DELETE FROM policy_events WHERE version = 1",
    ],
)
async def test_policy_event_can_neither_be_changed_nor_deleted(
    database_url: str, statement: str
) -> None:
    engine = make_engine(database_url)
    async with engine.begin() as connection:
        await trained(connection, 0)
        await promote(connection, "m", 1, reason="for the test", actor="operator")
    with pytest.raises(IntegrityError, match="policy_events are only added: the event"):
        async with engine.begin() as connection:
            await connection.execute(text(statement))
    await engine.dispose()
