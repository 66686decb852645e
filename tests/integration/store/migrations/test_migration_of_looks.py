"""Revision 0013: indexes of what is asked again and again, on rows that there were before."""

import msgspec
from sqlalchemy import text

from store.connection.engine import make_engine
from store.schema.migrate import check, downgrade, upgrade
from store.updates.files import unasked_versions
from store.write.ingest import Ingester
from tests.support.records import ago, call, tokens

DAY_S = 86_400.0
OLD_ROWS = (
    "INSERT INTO updates (id, policy, parent_version, version, state, recipe)"
    " SELECT uuidv7(), 'm', 0, v, 'done', '{}' FROM generate_series(1, 4) AS v",
    "INSERT INTO policies (name, version, state, served_name) VALUES ('m', 0, 'published', 'm')",
    "INSERT INTO policies (name, version, state, served_name, adapter_path, update_id, changed_at)"
    " SELECT 'm', version, CASE version WHEN 4 THEN 'serving' ELSE 'retired' END,"
    " 'm@' || version, '/a', id, now() - interval '1 day' FROM updates",
)
INDEXES = """
    SELECT indexname FROM pg_indexes WHERE indexname IN
        ('ix_policies_base', 'ix_policies_live', 'ix_policies_retired')
        OR indexdef LIKE '%octet_length(sampled_logprobs)%'
"""


async def test_calls_from_before_keep_their_versions(database_url: str) -> None:
    url = database_url
    engine = make_engine(url)
    async with engine.begin() as connection:
        for statement in OLD_ROWS:
            await connection.execute(text(statement))
    bare = msgspec.structs.replace(tokens([1], [2]), sampled_logprobs=b"")
    made = [
        call("whole", policy_version=1, **ago(DAY_S)),
        call("bare", policy_version=2, tokens=bare, **ago(DAY_S, 1)),
    ]
    await Ingester().store(engine, made)
    await engine.dispose()
    await downgrade(url, "0012")

    for _ in range(2):
        await upgrade(url)
        await check(url)
        engine = make_engine(url)
        async with engine.connect() as connection:
            # The tables' four, and that of the day's calls.
            assert len((await connection.execute(text(INDEXES))).all()) == 5
            unasked = await unasked_versions(connection, "m", {4}, 60.0)
            assert [one.version for one in unasked] == [1, 3]
        await engine.dispose()
        await downgrade(url, "0012")
        engine = make_engine(url)
        async with engine.connect() as connection:
            assert (await connection.execute(text(INDEXES))).all() == []
        await engine.dispose()
