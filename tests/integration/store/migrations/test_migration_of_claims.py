"""Rows of the schema in which an episode was one policy's: all stay, as free or as spent."""

from typing import Any, Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from store.connection.engine import make_engine
from store.records import SpoolRecord
from store.schema.migrate import check, downgrade, upgrade
from store.updates import claims
from store.updates.claims import Outcome
from store.updates.policies import ensure_base
from store.updates.ready import ClaimRule
from store.write.ingest import Ingester
from tests.support.records import call, reward

BEFORE: Final = "0007"
CHECKER: Final = {"agent": "checker", "policy": "checks", "policy_version": 2}
OUTSIDE: Final = {"policy": None, "policy_version": None, "trainable": False, "reason": "no_policy"}
DIGEST: Final = (b"1" * 16,)
SPENT: Final = {"done": True, "gone": True, "expired": False}


def rule(policy: str) -> ClaimRule:
    return ClaimRule(policy=policy, group_size=1, groups=99, smallest_group=1, max_age_s=1e-6)


def records() -> list[SpoolRecord]:
    """Episodes of every kind, all of them scored; two agents' calls in each."""
    found: list[SpoolRecord] = [
        call("outside first", **OUTSIDE, task="t"),
        call("outside first", policy_version=4),
        call("doubtful", confidence="doubtful"),
        call("whole", method="own", provides=DIGEST),
        call("part", method="own", needs=DIGEST, **CHECKER),
    ]
    for key in ("free", "held", *SPENT):
        found += [call(key, task=f"of {key}", policy_version=1), call(key, **CHECKER)]
    return [*found, *(reward(1.0, episode=one.episode) for one in found)]  # type: ignore[union-attr]


OLD_ROWS: Final = (
    "INSERT INTO updates (id, policy, parent_version, version, state, recipe)"
    " SELECT uuidv7(), 'm', 0, v, s, '{}'"
    " FROM (VALUES (1, 'done'), (NULL, 'expired'), (NULL, 'running')) AS made (v, s)",
    "INSERT INTO policies (name, version, state, served_name, adapter_path, update_id)"
    " SELECT 'm', 1, 'serving', 'm@1', '/a', id FROM updates WHERE version = 1",
    "UPDATE episodes e SET claimed_by = u.id FROM updates u, (VALUES ('done', 'done'),"
    " ('gone', 'done'), ('expired', 'expired'), ('held', 'running')) AS held (key, state)"
    " WHERE e.key = held.key AND u.state = held.state",
    "INSERT INTO consumptions (episode_id, update_id, trained, reason)"
    " SELECT e.id, u.id, u.state = 'done', CASE WHEN u.state <> 'done' THEN 'stale' END"
    " FROM episodes e JOIN updates u ON u.id = e.claimed_by WHERE u.state <> 'running'",
    "DELETE FROM transitions t USING episodes e WHERE e.id = t.episode_id AND e.key = 'gone'",
)
COUNTED: Final = {
    table: f"SELECT {columns} FROM {table} ORDER BY 1"
    for table, columns in {
        "episodes": "id, key, task, policy, policy_version, scored_at, quarantined_reason, root",
        "updates": "id, policy, version, state",
        "policies": "served_name, version, state, update_id",
        "consumptions": "episode_id, update_id, trained, reason, at",
    }.items()
}
HOLDERS: Final = "SELECT key, claimed_by FROM episodes ORDER BY 1"
HELD: Final = """
    SELECT e.key, p.claimed_by FROM episodes e
    LEFT JOIN episode_policies p ON p.episode_id = e.id AND p.claimed_by IS NOT NULL ORDER BY 1
"""


async def asked(url: str, query: str) -> list[tuple[Any, ...]]:
    engine = make_engine(url)
    async with engine.connect() as connection:
        rows = [tuple(row) for row in await connection.execute(text(query))]
    await engine.dispose()
    return rows


async def fill(url: str) -> None:
    """Leave the rows of a database of the schema before."""
    engine = make_engine(url)
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
        await connection.execute(text("UPDATE policies SET state = 'published'"))
    await Ingester().store(engine, records())
    await downgrade(url, BEFORE)
    await engine.dispose()
    engine = make_engine(url)
    async with engine.begin() as connection:
        for statement in OLD_ROWS:
            await connection.execute(text(statement))
    await engine.dispose()


async def claimed(engine: AsyncEngine, policy: str) -> list[str]:
    async with engine.begin() as connection:
        update_id = await claims.claim(connection, rule(policy), 2, {})
    if update_id is None:
        return []
    async with engine.connect() as connection:
        claim = await claims.load_claim(connection, update_id)
    async with engine.begin() as connection:
        await claims.release(connection, update_id, "test")
    return sorted(e.key for group in claim.groups for e in group.episodes)


async def test_all_rows_are_there_and_free_or_spent_as_before(database_url: str) -> None:
    url = database_url
    await fill(url)
    before = {table: await asked(url, query) for table, query in COUNTED.items()}
    holders = await asked(url, HOLDERS)
    assert sum(holder is not None for _, holder in holders) == 4
    await upgrade(url)
    await check(url)
    assert {table: await asked(url, query) for table, query in COUNTED.items()} == before
    assert await asked(url, HELD) == holders
    engine = make_engine(url)
    async with engine.connect() as connection:
        running = await claims.running_update(connection, "m")
    assert running is not None
    # What was spent is nobody's any more; what waited is now every policy's that called in it.
    assert await claimed(engine, "checks") == ["free", "whole"]
    async with engine.begin() as connection:
        assert await claims.release(connection, running, "test") == 1
    assert await claimed(engine, "m") == ["free", "held", "outside first", "whole"]
    await engine.dispose()

    await downgrade(url, BEFORE)
    assert {table: await asked(url, query) for table, query in COUNTED.items()} == before | {
        "updates": await asked(url, COUNTED["updates"])
    }
    assert dict(await asked(url, HOLDERS)) == dict(holders) | {"held": None}
    await upgrade(url)
    await check(url)


async def test_down_again_an_episode_is_one_policys(database_url: str) -> None:
    url = database_url
    engine = make_engine(url)
    await Ingester().store(engine, records())
    for policy in ("checks", "m"):
        async with engine.begin() as connection:
            update_id = await claims.claim(connection, rule(policy), 4, {})
            assert update_id is not None
            claim = await claims.load_claim(connection, update_id)
            outcomes = [
                Outcome(episode_id=e.id, trained=True) for g in claim.groups for e in g.episodes
            ]
            await claims.consume(
                connection, update_id, outcomes, {}, policy=policy, version=None, adapter_path=None
            )
    await engine.dispose()
    await downgrade(url, BEFORE)
    query = (
        "SELECT e.key, u.policy, c.update_id = e.claimed_by FROM consumptions c"
        " JOIN episodes e ON e.id = c.episode_id JOIN updates u ON u.id = c.update_id ORDER BY 1"
    )
    keys = sorted(["free", "held", *SPENT, "outside first", "whole"])
    assert await asked(url, query) == [(key, "m", True) for key in keys]
