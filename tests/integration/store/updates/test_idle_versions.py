"""Which versions nobody has used for a while: what the stored calls say, looked up one by one."""

from random import Random
from typing import Any, Final

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from store.database import driver_of
from store.questions import pinned_episodes, pinned_version
from store.records import CallRecord
from store.version_queries import idle_versions, unserved_versions
from store.version_states import ensure_base
from store.versions import POLICY_STATES
from store.write.ingest import Ingester
from tests.support.ledger.history import let_events_change
from tests.support.ledger.lineage import State, add_in_state
from tests.support.records import ago, call

IDLE_S = 100.0
# A policy has one version in each of these states.
ONE_EACH = ("serving", "canary")
LONG_AGO_S = 2 * IDLE_S
SAID = (b"1" * 16,)
STATES: Final[tuple[State, ...]] = (*POLICY_STATES, "unloaded")
UNSERVED: Final = ("unloaded", "rejected")
# A version is in use if it served a call lately; or if it is the highest that served a call of an
# episode which called anybody lately, its parts and all.
ONE_BY_ONE = text(
    """
    WITH calls AS (
        SELECT t.policy, t.policy_version AS version, COALESCE(e.root, e.id) AS whole,
            t.started_at > now() - make_interval(secs => :idle_s) AS is_late
        FROM transitions t JOIN episodes e ON e.id = t.episode_id),
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
    """Versions of two policies in all states, and episodes that one or both of them served."""
    async with engine.begin() as connection:
        for name in ("m", "n"):
            await ensure_base(connection, name)
            for version in range(1, 9):
                state = draw.choice([one for one in STATES if one not in ONE_EACH])
                ago_s = draw.choice([0.0, LONG_AGO_S])
                deleted = state in UNSERVED and draw.random() < 0.3
                await add_in_state(connection, name, version, state, ago_s=ago_s, deleted=deleted)
    for one in drawn_calls(draw):
        await Ingester().store(engine, [one])


async def idle(engine: AsyncEngine) -> list[int]:
    async with engine.connect() as connection:
        return [one.version for one in await idle_versions(connection, "m", IDLE_S)]


async def unserved(engine: AsyncEngine) -> list[int]:
    async with engine.connect() as connection:
        return [one.version for one in await unserved_versions(connection, "m", IDLE_S)]


@pytest.mark.parametrize("seed", range(20))
async def test_all_at_once_is_one_by_one(engine: AsyncEngine, seed: int) -> None:
    await fill(engine, Random(seed))
    async with engine.begin() as connection:
        for name in ("m", "n", "nobody"):
            alone = (await connection.execute(ONE_BY_ONE, {"name": name, "idle_s": IDLE_S})).all()
            found = await idle_versions(connection, name, IDLE_S)
            assert [one.version for one in found] == sorted(
                one.version
                for one in alone
                if one.state in ("retired", "rolled_back") and not one.unloaded
            )
            found = await unserved_versions(connection, name, IDLE_S)
            assert [one.version for one in found] == sorted(
                one.version for one in alone if one.state == "rejected" or one.unloaded
            )


async def test_there_are_idle_versions_and_others(engine: AsyncEngine) -> None:
    """The draws above tell the two apart."""
    await fill(engine, Random(0))
    assert await idle(engine)
    assert await unserved(engine)
    assert len(await idle(engine)) + len(await unserved(engine)) < 8


async def test_control_and_what_a_roll_back_would_serve_are_never_idle(engine: AsyncEngine) -> None:
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
async def test_an_episode_that_moved_uses_its_new_version_alone(
    engine: AsyncEngine, turned: bool
) -> None:
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


async def test_a_joined_episode_goes_on_with_the_version_that_its_last_part_moved_to(
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


async def test_a_version_is_kept_for_an_episode_that_calls_another_policy_meanwhile(
    engine: AsyncEngine,
) -> None:
    await serve_ten(engine, v5="retired", v6="retired", v10="serving")
    records = [made("e", 0, 5, LONG_AGO_S), made("e", 1, 1, 1.0, policy="n")]
    await Ingester().store(engine, records)
    assert await idle(engine) == [6]


async def test_each_version_that_one_episode_asks_for_by_name_is_in_use(
    engine: AsyncEngine,
) -> None:
    await serve_ten(engine, v10="serving")
    # In this order: to what is called, the highest number and the last call say nothing.
    asked = [made("e", at, version, 1.0) for at, version in enumerate((3, 7, 5))]
    await Ingester().store(engine, asked)
    assert await unserved(engine) == [1, 2, 4, 6, 8, 9]


async def test_an_episode_that_was_rolled_back_keeps_the_version_that_it_calls(
    engine: AsyncEngine,
) -> None:
    await serve_ten(engine, v4="retired", v10="serving")
    await Ingester().store(engine, [made("e", 0, 5, LONG_AGO_S), made("e", 1, 4, 1.0)])
    assert await idle(engine) == []


@pytest.mark.parametrize("idle_s", [1e9, 4e9])
async def test_what_is_never_idle_is_not(engine: AsyncEngine, idle_s: float) -> None:
    """A recipe may say so with a time before the first that ids can tell."""
    await serve_ten(engine, v10="serving")
    async with engine.connect() as connection:
        assert await unserved_versions(connection, "m", idle_s) == []
