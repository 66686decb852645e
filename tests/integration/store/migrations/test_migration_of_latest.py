"""Revision 0015: the highest version of each episode, of rows that there were before."""

from typing import Any, Final

from sqlalchemy import text

from store.connection.engine import make_engine
from store.schema.migrate import check, downgrade, upgrade
from store.updates.policies import pinned_version
from store.write.ingest import Ingester
from tests.support.records import call

SAID: Final = (b"1" * 16,)
CHECKER: Final = {"agent": "checker", "policy": "checks"}
OUTSIDE: Final = {"policy": None, "policy_version": None, "trainable": False, "reason": "no_policy"}
# A day's calls may have been dropped; what was kept of them is the lowest version.
DROP: Final = "DELETE FROM transitions t USING episodes e WHERE e.id = episode_id AND key = 'gone'"
LATEST: Final = """
    SELECT e.key, p.policy, p.own_version, p.own_latest, p.version, p.latest
    FROM episode_policies p JOIN episodes e ON e.id = p.episode_id ORDER BY 1, 2
"""
INDEXES: Final = "SELECT count(*) FROM pg_indexes WHERE indexdef LIKE '%WHERE (policy_version > 0)'"
RECORDS: Final = (
    call("moved", policy_version=5),
    call("moved", policy_version=1),
    call("moved", policy_version=3, **CHECKER),
    call("based", policy_version=0),
    call("gone", policy_version=4),
    # One episode: its second part has moved, and only its first has called the other policy.
    call("whole", method="own", provides=SAID, **OUTSIDE),
    call("whole", policy_version=2, **CHECKER),
    call("part", method="own", needs=SAID, policy_version=6),
    call("part", method="own", policy_version=7),
)


async def asked(url: str, query: str) -> list[tuple[Any, ...]]:
    engine = make_engine(url)
    async with engine.connect() as connection:
        rows = [tuple(row) for row in await connection.execute(text(query))]
    await engine.dispose()
    return rows


async def test_rows_from_before_are_as_they_would_have_been_stored(database_url: str) -> None:
    url = database_url
    engine = make_engine(url)
    await Ingester().store(engine, RECORDS)
    async with engine.begin() as connection:
        await connection.execute(text(DROP))
    await engine.dispose()
    stored = await asked(url, LATEST)
    assert stored == [
        ("based", "m", 0, 0, 0, 0),
        ("gone", "m", 4, 4, 4, 4),
        ("moved", "checks", 3, 3, 3, 3),
        ("moved", "m", 1, 5, 1, 5),
        ("part", "m", 6, 7, 6, 7),
        ("whole", "checks", 2, 2, 2, 2),
        ("whole", "m", None, None, 6, 7),
    ]
    for _ in range(2):
        await downgrade(url, "0014")
        assert await asked(url, INDEXES) == [(0,)]
        await upgrade(url)
        await check(url)
        assert await asked(url, LATEST) == stored
        # The table's, and that of the day's calls.
        assert await asked(url, INDEXES) == [(2,)]
    engine = make_engine(url)
    async with engine.connect() as connection:
        for key, version in {"moved": 5, "whole": 7, "part": 7}.items():
            assert await pinned_version(connection, "m", key) == version
    await engine.dispose()
