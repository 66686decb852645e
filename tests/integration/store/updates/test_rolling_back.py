"""A roll-back frees the lineage of what fell, and gives the traffic to what servers have."""

from random import Random
from typing import Any, Final

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from store import version_states
from store.claim_query import ClaimRule, lock_ready_episodes, waiting_updates
from store.claims import expire_episodes, release
from store.errors import ClaimSpoilt, RolledBack, WrongVersionState
from store.read.gates import newest_promoted
from store.records import SpoolRecord
from store.version_queries import (
    list_events,
    list_versions,
    numbered_version,
    rollback_target,
    version_to_train_from,
)
from store.version_states import begin_canary, mark_unloaded, recall, roll_back
from store.versions import PolicyVersion
from tests.support.ledger.episodes import ingest, keys
from tests.support.ledger.lineage import load, promote, set_state, trained, unload
from tests.support.ledger.states import TEST, canary, check_told, states, version
from tests.support.ledger.updates import claimed, consume_all
from tests.support.records import call, reward

RULE: Final = {"control_share": 0.05}
BY: Final[Any] = {"reason": TEST, "actor": "operator"}


async def fall(connection: AsyncConnection, number: int) -> int | None:
    """Roll a version back, and return what serves instead."""
    serves = await roll_back(connection, await version(connection, number), **BY)
    return None if serves is None else serves.version


async def test_every_version_since_the_control_is_rolled_back_with_its_lineage(
    engine: AsyncEngine,
) -> None:
    """2 is the control of 3 and 4; 9 has another root."""
    async with engine.begin() as connection:
        await trained(connection, 0, 1, 2, 3, 2, 3, 4, 1, 0)
        for number in (1, 2, 3, 4):
            await promote(connection, "m", number, rule=RULE)
        await version_states.move_control(connection, "m", 2, 0.05, **BY)
        await canary(connection, 6)
        await load(connection, "m", 7, RULE, **BY)
        assert await fall(connection, 4) == 2
    assert await states(engine) == {
        0: "retired",
        1: "retired",
        2: "serving",
        3: "rolled_back",
        4: "rolled_back",
        # It waited, and 6 was newer.
        5: "retired",
        6: "rolled_back",
        7: "rejected",
        8: "written",
        9: "written",
    }
    async with engine.connect() as connection:
        why = {one.version: one.reason for one in reversed(await list_events(connection, "m"))}
    assert why[3] == "it served since the control did, like m@4, which was rolled back"
    assert why[6] == "it descends from m@3, which failed"
    assert why[2] == "m@4 was rolled back: for the test"
    await check_told(engine)


async def test_canary_is_rolled_back_with_only_its_own_lineage(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0, 1, 2, 1)
        await promote(connection, "m", 1, rule=RULE)
        await canary(connection, 2)
        await load(connection, "m", 4, RULE, **BY)
        assert await fall(connection, 2) is None
        assert (await version_to_train_from(connection, "m")).version == 4
        # One that is loaded is rejected, and what serves is left alone.
        assert await fall(connection, 4) is None
        assert (await version_to_train_from(connection, "m")).version == 1
    assert await states(engine) == {
        0: "retired",
        1: "serving",
        2: "rolled_back",
        3: "rolled_back",
        4: "rejected",
    }


async def test_control_survives_the_roll_back_of_its_parent(engine: AsyncEngine) -> None:
    """An operator gave the traffic to an older version, beside which a newer one did better."""
    async with engine.begin() as connection:
        await trained(connection, 0, 1, 2, 1)
        await promote(connection, "m", 1, rule=RULE)
        await promote(connection, "m", 2, rule=RULE)
        await promote(connection, "m", 1)
        await version_states.move_control(connection, "m", 2, 0.05, **BY)
        assert await fall(connection, 1) == 2
        assert (await version_to_train_from(connection, "m")).version == 3
    assert await states(engine) == {
        0: "retired",
        1: "rolled_back",
        2: "serving",
        3: "written",
        4: "rejected",
    }


async def test_rolled_back_version_never_serves_again(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0)
        await promote(connection, "m", 1, rule=RULE)
        assert await fall(connection, 1) == 0
        with pytest.raises(RolledBack, match="m@1 was rolled back, or ended"):
            await promote(connection, "m", 1)
        await mark_unloaded(connection, "m", [1], "idle", "trainer")
        with pytest.raises(version_states.StateChanged, match="m@1 cannot be loaded again"):
            await recall(connection, "m", 1, **BY)
    assert await states(engine) == {0: "serving", 1: "rolled_back"}


@pytest.mark.parametrize(("served", "before"), [((1, 2, 3, 1, 4), 1), ((1, 2, 3, 0, 4), 0)])
async def test_roll_back_without_a_control_serves_the_version_that_served_before(
    engine: AsyncEngine, served: tuple[int, ...], before: int
) -> None:
    """Whatever its number, and whoever asked first: by who moved the traffic."""
    async with engine.begin() as connection:
        await trained(connection, 0, 1, 2, before)
    for number in served:
        async with engine.begin() as early:
            await early.execute(text("SELECT now()"))
            async with engine.begin() as connection:
                await promote(connection, "m", number)
    async with engine.begin() as connection:
        assert (await rollback_target(connection, "m")).version == before
        # No server is to unload it; all others may be.
        unloaded = await mark_unloaded(connection, "m", range(5), "idle", "trainer")
        assert unloaded == {1, 2, 3} - {before}
        assert await fall(connection, 4) == before


async def test_roll_back_never_serves_an_unserved_or_unloaded_version(
    engine: AsyncEngine,
) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0, 0, 0, 0)
        for number in (1, 2):
            await promote(connection, "m", number)
        await set_state(connection, "m", 3, "retired")
        assert await newest_promoted(connection, "m") == 2
        await promote(connection, "m", 4)
        await unload(connection, "m", 2)
        assert await fall(connection, 4) == 1


async def test_base_or_ended_version_cannot_be_rolled_back_and_a_written_one_is_rejected(
    engine: AsyncEngine,
) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0)
        await fall(connection, 1)
        assert (await version(connection, 1)).state == "rejected"
        for number in (0, 1):
            with pytest.raises(WrongVersionState, match="only a trained version in state"):
                await fall(connection, number)


# Whatever happened before, held against one by one


async def step(connection: AsyncConnection, draw: Random) -> None:
    """Do what a trainer, a controller, or an operator may do next."""
    one = draw.choice(await list_versions(connection, "m"))
    number = one.version
    is_tried = "canary" in {other.state for other in await list_versions(connection, "m")}
    evidence = {"verdict": draw.choice(["better", "undecided"])}
    if one.state == "written":
        share = draw.choice([0.0, 0.05, 0.05, 0.3])
        await load(connection, "m", number, {"control_share": share}, **BY)
    elif one.state == "loaded" and not is_tried and draw.random() < 0.5:
        await begin_canary(connection, one, 0.1, **BY)
    elif one.state in ("loaded", "canary") and draw.random() < 0.8:
        await version_states.promote(connection, "m", number, evidence=evidence, **BY)
    elif one.state == "retired" and one.unloaded:
        await recall(connection, "m", number, **BY)
    elif one.state == "retired" and draw.random() < 0.3:
        await version_states.promote(connection, "m", number, **BY)
    elif one.state in ("retired", "rolled_back"):
        await mark_unloaded(connection, "m", [number], TEST, "trainer")
    elif one.state != "rejected" and number and (one.state != "serving" or draw.random() < 0.3):
        await check_fall(connection, one)


async def check_fall(connection: AsyncConnection, fallen: PolicyVersion) -> None:
    """Roll a version back, and check what became of each, and what serves."""
    before = {one.version: one for one in await list_versions(connection, "m")}
    query = "SELECT version, to_state, from_state FROM policy_events ORDER BY at, id"
    served = [
        row.version
        for row in await connection.execute(text(query))
        if row.to_state == "serving" and row.from_state != "serving"
    ]
    query = "SELECT version, parent_version FROM updates"
    parents = {row.version: row.parent_version for row in await connection.execute(text(query))}
    control = next((one for one in before.values() if one.state == "retired" and one.share), None)
    lost = {fallen.version}
    if control is not None and fallen.state == "serving":
        last = len(served) - 1 - served[::-1].index(control.version)
        lost |= {*served[last + 1 :]} - {0}
    for number in sorted(parents):
        if parents[number] in lost and (control is None or number != control.version):
            lost.add(number)
    expected = {
        number: one.state
        if number not in lost or one.state == "rejected"
        else ("rejected" if one.state in ("written", "loaded") else "rolled_back")
        for number, one in before.items()
    }
    serves = await roll_back(connection, fallen, **BY)
    if fallen.state == "serving":
        back = [
            number
            for number in reversed(served)
            if expected[number] == "retired" and not before[number].unloaded
        ]
        number = back[0] if control is None else control.version
        assert serves is not None
        assert serves.version == number
        expected[number] = "serving"
    else:
        assert serves is None
    after = await list_versions(connection, "m")
    assert {one.version: one.state for one in after} == expected


@pytest.mark.parametrize("seed", range(12))
async def test_roll_back_ends_only_the_versions_own_lineage_and_serves_a_loaded_version(
    engine: AsyncEngine, seed: int
) -> None:
    draw = Random(seed)
    async with engine.begin() as connection:
        # In the order of their numbers each is trained on from the base, or an older one.
        await trained(connection, *(draw.randint(max(0, n - 3), n) for n in range(12)))
        for _ in range(80):
            await step(connection, draw)
            now = await list_versions(connection, "m")
            [serving] = [one for one in now if one.state == "serving"]
            controls = [one for one in now if one.state == "retired" and one.share]
            assert serving.is_servable
            assert len(controls) <= 1
            target = await rollback_target(connection, "m")
            assert target.is_servable
            assert not controls or target.version == controls[0].version
    await check_told(engine)


async def test_update_from_a_version_that_failed_meanwhile_makes_no_version(
    engine: AsyncEngine,
) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0, 1)
        await promote(connection, "m", 1, rule=RULE)
        await ingest(connection, [call("e", policy_version=0), reward(1.0, episode="e")])
    claim = await claimed(engine, ALL, 2)
    assert claim is not None
    async with engine.begin() as connection:
        assert await fall(connection, 1) == 0
    with pytest.raises(ClaimSpoilt, match="trained from m@2, which has failed since"):
        await consume_all(engine, claim, {}, 3)
    assert await states(engine) == {0: "serving", 1: "rolled_back", 2: "rejected"}


# Episodes of a version that was rolled back: never claimed, and consumed untrained


ALL: Final = ClaimRule(policy="m", group_size=1, groups=9, max_age_s=1e-6, fewest=1)
# The versions that each episode had, one after the other; 2 and 4 are rolled back.
HAD: Final = {
    "one": (1,),
    "two": (2,),
    "three": (3,),
    "to-two": (1, 2),
    "by-two": (1, 2, 3),
    "past-two": (1, 3),
    "from-two": (2, 3),
    "four": (4,),
}
LOST: Final = {name for name, versions in HAD.items() if {2, 4} & set(versions)}
KEPT: Final = set(HAD) - LOST


def records(*, whole: bool = True) -> list[SpoolRecord]:
    """All episodes, each with a call by each of its versions, and a reward."""
    made: list[SpoolRecord] = []
    for name, versions in HAD.items():
        made += [call(name, policy_version=one, task=f"t-{name}") for one in versions]
        made += [reward(1.0, episode=name)] if whole else []
    return made


async def roll_back_two(connection: AsyncConnection) -> None:
    """Versions 1 and 3 had the traffic, and it is 3's again."""
    await promote(connection, "m", 1)
    for number in (2, 4):
        await promote(connection, "m", number)
        await set_state(connection, "m", number, "rolled_back")
        await promote(connection, "m", 3)


@pytest.fixture
async def lost(engine: AsyncEngine) -> AsyncEngine:
    """Such episodes, of which two versions were rolled back."""
    async with engine.begin() as connection:
        await trained(connection, 0, 1, 1, 3)
        await roll_back_two(connection)
        await ingest(connection, records())
    return engine


async def consumed(connection: AsyncConnection) -> dict[str, str | None]:
    """Why each episode was consumed, None while it is free."""
    query = """
        SELECT e.key, c.reason FROM episodes e JOIN episode_policies p ON p.episode_id = e.id
        LEFT JOIN consumptions c ON (c.episode_id, c.policy) = (p.episode_id, p.policy)
    """
    return {row.key: row.reason for row in await connection.execute(text(query))}


async def test_no_update_claims_episodes_of_a_rolled_back_version(lost: AsyncEngine) -> None:
    claim = await claimed(lost, ALL, 3)
    assert claim is not None
    assert set(keys(claim)) == KEPT
    async with lost.begin() as connection:
        await release(connection, claim.update_id, "for the test")
        assert await waiting_updates(connection, ALL) == len(KEPT) / ALL.episodes_needed


@pytest.mark.parametrize("unloaded", [False, True])
async def test_episodes_of_a_rolled_back_version_are_consumed_untrained(
    lost: AsyncEngine, unloaded: bool
) -> None:
    async with lost.begin() as connection:
        if unloaded:
            assert await mark_unloaded(connection, "m", [2, 4], "idle", "trainer") == {2, 4}
        assert await expire_episodes(connection, ALL, 3, {}) == {"rolled_back": len(LOST)}
        assert await consumed(connection) == {
            name: "rolled_back" if name in LOST else None for name in HAD
        }
        trained_on = text("SELECT count(*) FROM consumptions WHERE trained")
        assert await connection.scalar(trained_on) == 0
        assert await expire_episodes(connection, ALL, 3, {}) == {}
        assert len(await lock_ready_episodes(connection, ALL, 0)) == len(KEPT)


async def test_unscored_episodes_of_a_rolled_back_version_expire_as_rolled_back(
    engine: AsyncEngine,
) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0, 1, 1, 3)
        await roll_back_two(connection)
        await ingest(connection, records(whole=False))
    async with engine.begin() as connection:
        short = ClaimRule(
            policy="m",
            group_size=1,
            groups=9,
            max_age_s=1e9,
            max_staleness=0,
        )
        counted = await expire_episodes(connection, short, 4, {})
    # Of those that are kept, "one" and "past-two" began before the version that serves.
    assert counted == {"rolled_back": len(LOST), "stale": 2}


async def test_claim_with_episodes_of_a_rolled_back_version_is_not_consumed(
    engine: AsyncEngine,
) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0, 1, 1, 3)
        await ingest(connection, records())
    claim = await claimed(engine, ALL, 3)
    assert claim is not None
    async with engine.begin() as connection:
        await roll_back_two(connection)
    with pytest.raises(ClaimSpoilt, match=r"sampled 5 episodes of update .* was rolled back"):
        await consume_all(engine, claim, {}, 5)
    async with engine.begin() as connection:
        assert await numbered_version(connection, "m", 5) is None
        assert await release(connection, claim.update_id, "it holds what was rolled back") == 8
    again = await claimed(engine, ALL, 3)
    assert again is not None
    assert set(keys(again)) == KEPT
    await consume_all(engine, again, {}, 5)


async def test_rolled_back_versions_do_not_count_for_staleness(lost: AsyncEngine) -> None:
    rule = ClaimRule(policy="m", group_size=1, groups=9, max_age_s=1e9, max_staleness=1)
    async with lost.begin() as connection:
        # Of 1 and 3 none is more than one version old, whatever came to nothing in between.
        assert await expire_episodes(connection, rule, 4, {}) == {"rolled_back": len(LOST)}
