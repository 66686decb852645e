"""Which versions no episode is under way with: what the stored calls say, looked up one by one."""

from random import Random
from typing import Any, Final

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from store.adapter_slots import DEFAULT_USUAL_S, versions_kept_for_episodes
from store.claim_query import ClaimRule
from store.database import driver_of
from store.questions import pinned_episodes, pinned_version
from store.records import CallRecord
from store.version_queries import idle_versions
from store.version_states import ensure_base, recall
from store.versions import POLICY_STATES
from store.write.ingest import Ingester
from tests.support.ledger.history import let_events_change
from tests.support.ledger.lineage import State, add_in_state
from tests.support.ledger.updates import claimed, consume_all
from tests.support.records import ago, call, reward

# Longer than a call and a pause are taken for that nothing is known of.
IDLE_S = 100.0
# A policy has one version in each of these states.
ONE_EACH = ("serving", "canary")
LONG_AGO_S = 2 * IDLE_S
SAID = (b"1" * 16,)
STATES: Final[tuple[State, ...]] = (*POLICY_STATES, "unloaded")
UNSERVED: Final = ("unloaded", "rejected")
# A version is in use if it served a call lately; or if it is the highest that served a call of an
# episode which called anybody lately, its parts and all. With `unrewarded` only the episodes count
# that have no reward.
ONE_BY_ONE = text(
    """
    WITH calls AS (
        SELECT t.policy, t.policy_version AS version, COALESCE(e.root, e.id) AS whole,
            t.started_at > now() - make_interval(secs => :idle_s) AS is_late
        FROM transitions t JOIN episodes e ON e.id = t.episode_id
        WHERE NOT (CAST(:unrewarded AS boolean) AND EXISTS (
            SELECT FROM episodes w WHERE w.id = COALESCE(e.root, e.id) AND w.scored_at IS NOT NULL
        ))),
    used AS (
        SELECT policy, version FROM calls WHERE is_late
        UNION
        SELECT policy, max(version) FROM calls
        WHERE whole IN (SELECT whole FROM calls WHERE is_late) GROUP BY whole, policy)
    SELECT p.version, p.state, p.unloaded_at IS NOT NULL AS unloaded
    FROM policies p WHERE p.name = :name AND p.version > 0 AND p.files_deleted_at IS NULL
        AND p.changed_at < now() - make_interval(secs => :idle_s)
        AND (p.name, p.version) NOT IN (SELECT policy, version FROM used)
    """
)


def made(key: str, number: int, version: int, ago_s: float, **changes: Any) -> CallRecord:
    """A call of `version` that began `ago_s` seconds ago."""
    return call(key, policy_version=version, **ago(ago_s, number), **changes)


def drawn_calls(draw: Random) -> list[CallRecord]:
    """Calls of a few episodes for two policies, long ago and lately; some episodes are one."""
    # A digest that two episodes provide would be evidence about neither.
    links = {"e0": {"method": "own", "provides": SAID}, "e1": {"method": "own", "needs": SAID}}
    found: list[CallRecord] = []
    for number in range(draw.randint(0, 10)):
        key = f"e{draw.randrange(5)}"
        ago_s = draw.choice([1.0, LONG_AGO_S])
        who = {"policy": draw.choice("mn"), **links.pop(key, {})}
        found.append(made(key, number, draw.randrange(9), ago_s, **who))
    return found


async def fill(engine: AsyncEngine, draw: Random) -> None:
    """Versions of two policies in all states, and episodes of one or both, rewarded or not."""
    async with engine.begin() as connection:
        for name in ("m", "n"):
            await ensure_base(connection, name)
            for version in range(1, 9):
                state = draw.choice([one for one in STATES if one not in ONE_EACH])
                ago_s = draw.choice([0.0, LONG_AGO_S])
                deleted = state in UNSERVED and draw.random() < 0.3
                await add_in_state(connection, name, version, state, ago_s=ago_s, deleted=deleted)
    calls = drawn_calls(draw)
    for one in calls:
        await Ingester().store(engine, [one])
    for key in sorted({one.episode for one in calls}):
        if draw.random() < 0.3:
            await Ingester().store(engine, [reward(1.0, episode=key)])


async def idle(engine: AsyncEngine, name: str = "m") -> list[int]:
    async with engine.connect() as connection:
        kept = await versions_kept_for_episodes(connection, name)
    return sorted(one.version for one in kept if one.name == name and not one.is_under_way)


async def unserved(engine: AsyncEngine) -> list[int]:
    async with engine.connect() as connection:
        return [one.version for one in await idle_versions(connection, "m", IDLE_S)]


@pytest.mark.parametrize("seed", range(20))
async def test_query_for_all_idle_versions_agrees_with_single_lookups(
    engine: AsyncEngine, seed: int
) -> None:
    await fill(engine, Random(seed))
    async with engine.begin() as connection:
        for name in ("m", "n", "nobody"):
            values = {"name": name, "idle_s": IDLE_S}
            alone = (await connection.execute(ONE_BY_ONE, values | {"unrewarded": True})).all()
            assert await idle(engine, name) == sorted(
                one.version
                for one in alone
                if one.state in ("retired", "rolled_back") and not one.unloaded
            )
            alone = (await connection.execute(ONE_BY_ONE, values | {"unrewarded": False})).all()
            found = await idle_versions(connection, name, IDLE_S)
            assert [one.version for one in found] == sorted(
                one.version for one in alone if one.state == "rejected" or one.unloaded
            )


async def test_random_ledger_has_idle_and_used_versions(engine: AsyncEngine) -> None:
    """The draws above tell the two apart."""
    await fill(engine, Random(0))
    assert await idle(engine)
    assert await unserved(engine)
    assert len(await idle(engine)) + len(await unserved(engine)) < 8


async def test_control_and_rollback_target_are_never_idle(engine: AsyncEngine) -> None:
    await serve_ten(engine, v3="retired", v4="retired", v5="retired", v10="serving")
    served = "UPDATE policy_events SET at = now() - abs(version - 3) * interval '1 h'"
    share = "UPDATE policies SET share = 0.05 WHERE version = 5"
    async with engine.begin() as connection:
        await let_events_change(connection)
        await connection.execute(text(served))
    assert await idle(engine) == [4, 5]
    async with engine.begin() as connection:
        await connection.execute(text(share))
    assert await idle(engine) == [3, 4]


# An episode that had to leave its version


async def serve_ten(engine: AsyncEngine, **states: State) -> None:
    """Ten versions, unloaded long ago but for those that `states` says of."""
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
        await connection.execute(text("UPDATE policies SET state = 'retired'"))
        for version in range(1, 11):
            state = states.get(f"v{version}", "unloaded")
            await add_in_state(connection, "m", version, state, ago_s=LONG_AGO_S)


@pytest.mark.parametrize("turned", [False, True])
async def test_moved_episode_uses_only_its_new_version(engine: AsyncEngine, turned: bool) -> None:
    await serve_ten(engine, v5="retired", v6="retired", v10="serving")
    records = [made("e", 0, 1, LONG_AGO_S), made("e", 1, 5, 1.0)]
    for record in reversed(records) if turned else records:
        await Ingester().store(engine, [record])
    assert await idle(engine) == [6]
    # The first one may be unloaded, however long the episode goes on.
    assert 1 in await unserved(engine)
    async with engine.begin() as connection:
        driver = await driver_of(connection)
        assert await pinned_version(driver, "m", "e") == 5


async def test_joined_episode_continues_with_the_version_of_its_last_part(
    engine: AsyncEngine,
) -> None:
    await serve_ten(engine, v1="retired", v5="retired", v10="serving")
    records = [
        made("first", 0, 1, LONG_AGO_S, method="own", provides=SAID),
        made("second", 1, 5, 1.0, method="own", needs=SAID),
    ]
    for record in reversed(records):
        await Ingester().store(engine, [record])
    assert await idle(engine) == [1]
    async with engine.begin() as connection:
        driver = await driver_of(connection)
        pins = {key: version for _, key, version in await pinned_episodes(driver, 10)}
    assert pins == {"first": 5, "second": 5}


async def test_version_is_not_idle_while_its_episode_calls_another_policy(
    engine: AsyncEngine,
) -> None:
    await serve_ten(engine, v5="retired", v6="retired", v10="serving")
    records = [made("e", 0, 5, LONG_AGO_S), made("e", 1, 1, 1.0, policy="n")]
    await Ingester().store(engine, records)
    assert await idle(engine) == [6]


async def test_each_version_that_an_episode_asks_for_by_name_is_in_use(
    engine: AsyncEngine,
) -> None:
    await serve_ten(engine, v10="serving")
    # In this order: to what is called, the highest number and the last call say nothing.
    asked = [made("e", at, version, 1.0) for at, version in enumerate((3, 7, 5))]
    await Ingester().store(engine, asked)
    assert await unserved(engine) == [1, 2, 4, 6, 8, 9]


async def test_version_is_idle_once_its_episodes_are_rewarded_unless_they_are_evaluation(
    engine: AsyncEngine,
) -> None:
    await serve_ten(engine, v4="retired", v5="retired", v6="retired", v10="serving")
    await Ingester().store(engine, [made("live", 0, 4, 1.0), made("waits", 1, 6, 1.0)])
    await Ingester().store(engine, [made("held-out", 2, 5, 1.0, split="eval")])
    assert await idle(engine) == []
    for key in ("live", "held-out"):
        await Ingester().store(engine, [reward(1.0, episode=key)])
    assert await idle(engine) == [4]


@pytest.mark.parametrize(
    ("pause_s", "call_s", "keeps"), [(8, 1, False), (40, 1, True), (8, 40, True)]
)
async def test_agents_usual_pause_and_call_length_decide_how_long_its_version_is_in_use(
    engine: AsyncEngine, pause_s: float, call_s: float, keeps: bool
) -> None:
    await serve_ten(engine, v4="retired", v5="retired", v10="serving")
    trained = [
        made(f"t{number}", 10 * number + at, 3, 900.0 - at * pause_s, total_ms=1000.0 * call_s)
        for number in range(3)
        for at in range(3)
    ]
    await Ingester().store(engine, trained)
    for number in range(3):
        await Ingester().store(engine, [reward(1.0, episode=f"t{number}")])
    rule = ClaimRule(policy="m", group_size=1, groups=3, max_age_s=1e9)
    claim = await claimed(engine, rule, 3)
    assert claim is not None
    await consume_all(engine, claim)
    await Ingester().store(engine, [made("e", 0, 4, 30.0)])
    assert await idle(engine) == ([5] if keeps else [4, 5])


async def test_version_is_not_idle_for_a_while_after_it_lost_the_traffic(
    engine: AsyncEngine,
) -> None:
    """The database knows of no call before it has ended."""
    await serve_ten(engine, v4="retired", v10="serving")
    await changed(engine, 4, ago_s=DEFAULT_USUAL_S - 10)
    assert await idle(engine) == []
    await changed(engine, 4, ago_s=DEFAULT_USUAL_S + 1)
    assert await idle(engine) == [4]


async def test_recalled_version_is_not_idle(engine: AsyncEngine) -> None:
    """Recalled: it was unloaded, and is to be loaded again."""
    await serve_ten(engine, v4="retired", v10="serving")
    async with engine.begin() as connection:
        await recall(connection, "m", 5, reason="to go back", actor="operator")
        await let_events_change(connection)
        earlier = "SET {} = {} - interval '100 s' WHERE name = 'm' AND version = 5"
        for table, column in (("policies", "changed_at"), ("policy_events", "at")):
            await connection.execute(text(f"UPDATE {table} " + earlier.format(column, column)))
    assert await idle(engine) == [4]


async def changed(engine: AsyncEngine, version: int, *, ago_s: float) -> None:
    """Let a version have its state for so long."""
    query = "UPDATE policies SET changed_at = now() - make_interval(secs => :s) WHERE version = :v"
    async with engine.begin() as connection:
        await connection.execute(text(query), {"s": ago_s, "v": version})


async def test_episode_that_moved_to_an_older_version_keeps_it_in_use(
    engine: AsyncEngine,
) -> None:
    await serve_ten(engine, v4="retired", v10="serving")
    await Ingester().store(engine, [made("e", 0, 5, LONG_AGO_S), made("e", 1, 4, 1.0)])
    assert await idle(engine) == []


@pytest.mark.parametrize("idle_s", [1e9, 4e9])
async def test_huge_idle_time_setting_makes_no_version_count_as_unserved(
    engine: AsyncEngine, idle_s: float
) -> None:
    """A recipe may say so with a time before the first that ids can tell."""
    await serve_ten(engine, v10="serving")
    async with engine.connect() as connection:
        assert await idle_versions(connection, "m", idle_s) == []
