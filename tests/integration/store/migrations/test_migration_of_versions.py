"""Revision 0014: an index of the versions that have their files, on rows that there were before."""

from sqlalchemy import text

from store.connection.engine import make_engine
from store.schema.migrate import check, downgrade, upgrade
from store.updates.files import deleted_versions, versions_with_files

OLD_ROWS = (
    "INSERT INTO updates (id, policy, parent_version, version, state, recipe)"
    " SELECT uuidv7(), 'm', 0, v, 'done', '{}' FROM generate_series(1, 4) AS v",
    "INSERT INTO policies (name, version, state, served_name) VALUES"
    " ('m', 0, 'published', 'm'), ('a', 0, 'serving', 'm')",
    "INSERT INTO policies (name, version, state, served_name, adapter_path, update_id,"
    " files_deleted_at)"
    " SELECT 'm', version, CASE version WHEN 4 THEN 'serving' ELSE 'retired' END,"
    " 'm@' || version, '/a', id, CASE WHEN version < 3 THEN now() END FROM updates",
)
INDEX = "SELECT count(*) FROM pg_indexes WHERE indexname = 'ix_policies_with_files'"


async def test_versions_from_before_are_listed_by_their_files(empty_database_url: str) -> None:
    url = empty_database_url
    await upgrade(url, "0013")
    engine = make_engine(url)
    async with engine.begin() as connection:
        for statement in OLD_ROWS:
            await connection.execute(text(statement))
    await engine.dispose()

    for _ in range(2):
        await upgrade(url)
        await check(url)
        engine = make_engine(url)
        async with engine.connect() as connection:
            assert await connection.scalar(text(INDEX)) == 1
            every = await versions_with_files(connection)
            assert [(v.name, v.version) for v in every] == [("a", 0), ("m", 0), ("m", 3), ("m", 4)]
            alone = await versions_with_files(connection, "m")
            assert alone == every[1:]
            assert await deleted_versions(connection, "m", [1, 3, 9]) == {1}
            assert await deleted_versions(connection, "a", [1, 3, 9]) == set()
        await engine.dispose()
        await downgrade(url, "0013")
        engine = make_engine(url)
        async with engine.connect() as connection:
            assert await connection.scalar(text(INDEX)) == 0
        await engine.dispose()
