"""The one migration path: up, down, and no drift between tables and migrations."""

from collections.abc import Sequence

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from store.connection.engine import make_engine
from store.ids import new_id, time_of
from store.records import SpoolRecord
from store.schema.migrate import check, downgrade, upgrade
from store.schema.partitions import ensure_partition
from store.updates.claims import begin_update, claim
from store.updates.policies import add_version, ensure_base, make_ready
from store.updates.ready import ClaimRule
from store.values.tokens import pack_logprobs
from store.write.ingest import Ingester
from tests.support.records import call, reward


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


OLD_EPISODE_NOW = """
    INSERT INTO episodes (id, key, method, task, task_named, policy, policy_version,
                          first_call_id, last_call_id, last_call_at)
    VALUES (:id, :key, 'header', 't', true, 'm', 0, :id, :id, now())
"""
OLD_CALL_NOW = """
    INSERT INTO transitions (id, episode_id, method, confidence, agent, dialect, policy,
        policy_version, status, http_status, stream, request, reply, prompt_ids, sampled_ids,
        sampled_logprobs, sampling, trainable, tool_calls, started_at, total_ms, retry)
    VALUES (:id, :id, 'header', 'certain', 'default', 'chat', 'm', 0, 'complete', 200, false,
        '{}', '{}', :ids, :ids, :logprobs, '{"temperature": 1.0}', true, '[]', now(), 1, 0)
"""


async def store_all(url: str, records: Sequence[SpoolRecord]) -> None:
    """Store records."""
    engine = make_engine(url)
    await Ingester().store(engine, records)
    await engine.dispose()


async def joins(url: str, query: str) -> list[tuple[object, ...]]:
    engine = make_engine(url)
    async with engine.connect() as connection:
        rows = sorted(map(tuple, await connection.execute(text(query))), key=str)
    await engine.dispose()
    return rows


SPENT = """
    WITH done AS (
        INSERT INTO updates (id, policy, parent_version, state, recipe)
        VALUES (:id, 'm', 0, 'done', '{}') RETURNING id)
    INSERT INTO consumptions (episode_id, update_id, trained)
    SELECT e.id, done.id, true FROM episodes e, done WHERE e.key = 'spent'
"""
HOLD = "UPDATE episodes SET claimed_by = :id WHERE key = 'spent'"
WHOLE = "SELECT key, scored_at, root, quarantined_reason, claimed_by FROM episodes ORDER BY 1"
WHOLE_NOW = """
    SELECT e.key, e.scored_at, e.root, e.quarantined_reason, p.claimed_by
    FROM episodes e LEFT JOIN episode_policies p ON p.episode_id = e.id ORDER BY 1
"""
EVALUATION = (
    "SELECT key FROM episodes WHERE COALESCE(joined_split, split) = 'eval'"
    " AND quarantined_reason IS NULL AND root IS NULL"
)
KEPT = "SELECT key FROM episodes WHERE quarantined_reason LIKE '%evaluation' AND root IS NULL"


async def store_as_before(engine: AsyncEngine, key: str) -> None:
    """Store an episode of one call as the version before does: without a split."""
    one = new_id()
    values = {"id": one, "ids": b"\x01\x00\x00\x00", "logprobs": pack_logprobs([-0.5])}
    async with engine.begin() as connection:
        await ensure_partition(connection, time_of(one).date())
        await connection.execute(text(OLD_EPISODE_NOW), {"id": one, "key": key})
        await connection.execute(text(OLD_CALL_NOW), values)


async def test_what_was_stored_before_splits_is_trainings(database_url: str) -> None:
    url = database_url
    await downgrade(url, "0007")
    engine = make_engine(url)
    for key in ("spent", "waiting", "doubtful"):
        await store_as_before(engine, key)
    async with engine.begin() as connection:
        update_id = new_id()
        await connection.execute(text(SPENT), {"id": update_id})
        await connection.execute(text(HOLD), {"id": update_id})
        await connection.execute(
            text("UPDATE episodes SET quarantined_reason = 'why' WHERE key = 'doubtful'")
        )
    before = await joins(url, WHOLE)
    assert len(before) == 3
    await engine.dispose()

    await upgrade(url)
    await check(url)
    assert await joins(url, WHOLE_NOW) == before
    splits = "SELECT DISTINCT split, joined_split FROM episodes"
    assert await joins(url, splits) == [("train", None)]
    assert await joins(url, "SELECT DISTINCT split FROM transitions") == [("train",)]
    engine = make_engine(url)
    # A keeper of the version before, which still runs.
    await store_as_before(engine, "late")
    every = ("spent", "waiting", "doubtful")
    await Ingester().store(engine, [reward(1.0, episode=key) for key in every])
    rule = ClaimRule(policy="m", group_size=1, groups=9, smallest_group=1, max_age_s=1e-6)
    async with engine.begin() as connection:
        claimed = await claim(connection, rule, 0, {})
    await engine.dispose()
    held = (
        "SELECT e.key FROM episodes e JOIN episode_policies p ON p.episode_id = e.id"
        f" WHERE p.claimed_by = '{claimed}'"
    )
    assert await joins(url, held) == [("waiting",)]
    assert await joins(url, "SELECT count(*) FROM consumptions") == [(1,)]


async def test_evaluation_is_kept_from_training_in_the_schema_before(
    database_url: str,
) -> None:
    url = database_url
    told = b"\x01" * 16
    await store_all(
        url,
        [
            call("e", split="eval"),
            call("a", method="own", provides=(told,)),
            call("b", method="own", split="eval", needs=(told,)),
            call("t"),
        ],
    )
    assert await joins(url, EVALUATION) == [("a",), ("e",)]
    await downgrade(url, "0007")
    assert await joins(url, KEPT) == [("a",), ("e",)]
    await upgrade(url)
    assert await joins(url, EVALUATION) == [("a",), ("e",)]
    assert await joins(url, KEPT) == []
    await check(url)


async def test_versions_that_wait_to_go_live_survive_up_and_are_probed_again_after_down(
    database_url: str,
) -> None:
    engine = make_engine(database_url)
    states = text("SELECT version, state FROM policies ORDER BY version")
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
        update = await begin_update(connection, "m", 0, {})
        await add_version(connection, "m", 1, "/adapters/m/1", update)
    await engine.dispose()
    await downgrade(database_url, "0009")
    await upgrade(database_url)
    async with engine.begin() as connection:
        assert dict(map(tuple, await connection.execute(states))) == {0: "serving", 1: "written"}
        await make_ready(connection, "m", 1, reason="for the test", actor="operator")
    await engine.dispose()
    await check(database_url)
    await downgrade(database_url, "0009")
    async with engine.connect() as connection:
        assert dict(map(tuple, await connection.execute(states))) == {0: "serving", 1: "written"}
    await engine.dispose()


REWARDS = """
    SELECT e.key, e.reward, p.reward
    FROM episodes e JOIN episode_policies p ON p.episode_id = e.id ORDER BY 1
"""


async def test_rewards_of_before_tell_which_groups_differ(database_url: str) -> None:
    url = database_url
    told = b"\x02" * 16
    whole = call("whole", method="own", provides=(told,))
    part = call("part", method="own", needs=(told,))
    records = [
        call("corrected", task="t"),
        call("single", task="t"),
        call("unscored", task="t"),
        whole,
        part,
        reward(0.25, episode="corrected", at=1),
        reward(0.75, episode="corrected", at=5),
        reward(1.0, episode="corrected", at=5),
        reward(0.5, episode="whole", at=1),
        reward(1.0, call=str(part.id), at=2),
    ]
    single = [one.id for one in records if getattr(one, "episode", None) == "single"]
    await store_all(url, records)
    await store_all(url, [reward(1.0, call=str(single[0]))])
    before = await joins(url, REWARDS)
    assert [row for row in before if row[0] in ("corrected", "single", "unscored")] == [
        ("corrected", 0.75, 0.75),
        ("single", None, None),
        ("unscored", None, None),
    ]
    assert ("whole", 1.0, 1.0) in before
    await downgrade(url, "0009")
    await upgrade(url)
    await check(url)
    assert await joins(url, REWARDS) == before


FAILED = """
    SELECT e.key, e.failed, p.failed
    FROM episodes e JOIN episode_policies p ON p.episode_id = e.id ORDER BY 1
"""


async def test_of_what_had_failed_only_refused_requests_are_failures(
    database_url: str,
) -> None:
    url = database_url
    told = b"\x03" * 16
    await store_all(
        url,
        [
            call("answered"),
            call("lost", status="truncated"),
            call("refused", http_status=400),
            call("away", status="upstream_error", http_status=502),
            call("joined", method="own", provides=(told,)),
            call("joined part", method="own", needs=(told,), http_status=400),
        ],
    )
    own = {"refused": (True, True), "joined": (False, True), "joined part": (True, True)}
    now = {key: own.get(key, (False, False)) for key in ("answered", "lost", "away", *own)}
    found = {key: failed for key, *failed in await joins(url, FAILED)}
    # What a part's own row says is not asked: it is never claimed.
    found["joined part"] = [True, True]
    assert {key: tuple(failed) for key, failed in found.items()} == now
    before = await joins(url, FAILED)
    await downgrade(url, "0009")
    failed = {key for key, failed, _ in await joins(url, FAILED) if failed}
    assert failed == {"refused", "lost", "away", "joined part"}
    await upgrade(url)
    assert await joins(url, FAILED) == before
