"""Revision 0011: versions whose files were deleted, on rows that there were before."""

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from store.connection.engine import make_engine
from store.schema.migrate import check, downgrade, upgrade
from store.updates.files import mark_deleted
from store.updates.policies import list_versions

OLD_ROWS = (
    "INSERT INTO updates (id, policy, parent_version, version, state, recipe)"
    " SELECT uuidv7(), 'm', 0, v, 'done', '{}' FROM generate_series(1, 3) AS v",
    "INSERT INTO policies (name, version, state, served_name) VALUES ('m', 0, 'published', 'm')",
    "INSERT INTO policies (name, version, state, served_name, adapter_path, update_id)"
    " SELECT 'm', version, (ARRAY['retired', 'rejected', 'serving'])[version],"
    " 'm@' || version, '/a/' || version, id FROM updates",
)
STATES = "SELECT version, state, adapter_path FROM policies ORDER BY 1"


async def test_versions_from_before_have_their_files(empty_database_url: str) -> None:
    url = empty_database_url
    await upgrade(url, "0011")
    engine = make_engine(url)
    async with engine.begin() as connection:
        for statement in OLD_ROWS:
            await connection.execute(text(statement))
        before = (await connection.execute(text(STATES))).all()
    await upgrade(url)
    await check(url)
    async with engine.begin() as connection:
        assert not any(one.files_deleted for one in await list_versions(connection, "m"))
        # What serves is never marked.
        assert await mark_deleted(connection, "m", [1, 2, 3]) == {1, 2}
    with pytest.raises(IntegrityError, match="deleted_is_not_servable"):
        async with engine.begin() as connection:
            await connection.execute(text("UPDATE policies SET state = 'published'"))
    await engine.dispose()

    await downgrade(url, "0011")
    engine = make_engine(url)
    async with engine.connect() as connection:
        assert (await connection.execute(text(STATES))).all() == before
    await engine.dispose()
    await upgrade(url)
    await check(url)
