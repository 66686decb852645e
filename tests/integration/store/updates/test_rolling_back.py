"""A roll-back gives the traffic to what had it before, and never to what fell or came of it."""

from typing import Final

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from store import version_states
from store.claim_query import ClaimRule, find_ready, waiting_updates
from store.claims import expire, release
from store.errors import HoldsRolledBack, NotGated, RolledBack
from store.read.gates import newest_promoted
from store.records import SpoolRecord
from store.version_queries import head_of, list_events, numbered_version, version_before
from store.version_states import change_state, make_ready, roll_back
from store.versions import PolicyState
from tests.support.ledger.episodes import ingest, keys
from tests.support.ledger.history import let_events_change
from tests.support.ledger.lineage import promote, set_state, trained
from tests.support.ledger.states import TEST, canary, check_told, states, version
from tests.support.ledger.updates import claimed, consume_all
from tests.support.records import call, reward


async def test_what_was_rolled_back_does_not_serve_again(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0)
        await promote(connection, "m", 1, reason=TEST, actor="trainer")
        before = await roll_back(
            connection, await version(connection, 1), reason="fell behind", actor="controller"
        )
        assert before is not None
        assert before.version == 0
    assert await states(engine) == {0: "serving", 1: "rolled_back"}
    async with engine.begin() as connection:
        with pytest.raises(RolledBack, match="m@1 was rolled back, so it cannot become 'serving'"):
            await promote(connection, "m", 1, reason=TEST, actor="operator")
        await set_state(connection, "m", 1, "retired", reason="idle", actor="trainer")
        assert (await version(connection, 1)).rolled_back
        with pytest.raises(RolledBack):
            await version_states.set_state(
                connection, "m", 1, "ready", reason=TEST, actor="trainer"
            )
    with pytest.raises(IntegrityError, match="rolled_back_for_good"):
        async with engine.begin() as connection:
            await connection.execute(
                text("UPDATE policies SET state = 'published' WHERE version = 1")
            )


@pytest.mark.parametrize(("served", "before"), [((1, 2, 3, 1, 4), 1), ((1, 2, 3, 0, 4), 0)])
async def test_what_had_the_traffic_before_serves_again_whatever_its_number(
    engine: AsyncEngine, served: tuple[int, ...], before: int
) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0, 1, 2, before)
    for number in served:
        async with engine.begin() as connection:
            await promote(connection, "m", number, reason=TEST, actor="operator")
    async with engine.begin() as connection:
        await roll_back(connection, await version(connection, 4), reason=TEST, actor="controller")
    found = await states(engine)
    assert [number for number, state in found.items() if state == "serving"] == [before]


async def test_what_was_trained_on_from_what_is_rolled_back_goes_with_it(
    engine: AsyncEngine,
) -> None:
    # 2 and 5 were trained from 1, then 3 from 2, 4 from 3; and 6 from the base.
    async with engine.begin() as connection:
        await trained(connection, 0, 1, 2, 3, 1, 0)
        await promote(connection, "m", 1, reason=TEST, actor="trainer")
        await canary(connection, 2)
        await make_ready(connection, "m", 5, reason=TEST, actor="trainer")
        await roll_back(connection, await version(connection, 1), reason="bad", actor="controller")
    found = await states(engine)
    assert (found[1], found[2], found[4], found[5]) == (
        "rolled_back",
        "rolled_back",
        "rejected",
        "rejected",
    )
    assert (found[0], found[6]) == ("serving", "written")
    async with engine.connect() as connection:
        [why] = [one.reason for one in await list_events(connection, "m", 4, most=1)]
    assert why == "it was trained on from m@1, which was rolled back"
    await check_told(engine)


@pytest.mark.parametrize("then", ["published", "retired"])
async def test_a_canary_that_never_served_serves_after_no_roll_back(
    engine: AsyncEngine, then: PolicyState
) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0, 0, 0)
        await promote(connection, "m", 1, reason=TEST, actor="operator")
        tried = await canary(connection, 2)
        # A newer one was promoted by hand meanwhile: the canary makes way for it.
        await change_state(connection, tried, "published", reason=TEST, actor="controller")
        assert await newest_promoted(connection, "m") == 1
        await promote(connection, "m", 3, reason=TEST, actor="operator")
        await set_state(connection, "m", 2, then, reason=TEST, actor="trainer")
        before = await version_before(connection, await version(connection, 3))
        assert before.version == 1
        serves = await roll_back(
            connection, await version(connection, 3), reason=TEST, actor="controller"
        )
        assert serves is not None
        assert serves.version == 1


async def test_what_was_trained_on_from_what_was_rolled_back_serves_after_no_roll_back(
    engine: AsyncEngine,
) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0, 1, 0)
        # An operator went back from 2 to 1, which fell then.
        for number in (1, 2, 1):
            await promote(connection, "m", number, reason=TEST, actor="operator")
        await roll_back(connection, await version(connection, 1), reason=TEST, actor="controller")
        assert (await version(connection, 2)).state == "published"
        await promote(connection, "m", 3, reason=TEST, actor="operator")
        assert (await version_before(connection, await version(connection, 3))).version == 0


async def test_what_had_the_traffic_last_is_told_by_who_moved_it_last(engine: AsyncEngine) -> None:
    """An operator's transaction began before the trainer's, and waited for it."""
    async with engine.begin() as connection:
        await trained(connection, 0, 1, 1)
        await promote(connection, "m", 1, reason=TEST, actor="trainer")
    async with engine.begin() as operator:
        await operator.execute(text("SELECT now()"))
        async with engine.begin() as trainer:
            await promote(trainer, "m", 2, reason=TEST, actor="trainer")
        await promote(operator, "m", 1, reason=TEST, actor="operator")
    async with engine.begin() as connection:
        await promote(connection, "m", 3, reason=TEST, actor="trainer")
        assert (await version_before(connection, await version(connection, 3))).version == 1


async def test_what_served_before_events_were_kept_serves_after_a_roll_back(
    engine: AsyncEngine,
) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0, 1)
        await promote(connection, "m", 1, reason=TEST, actor="operator")
        await promote(connection, "m", 2, reason=TEST, actor="operator")
        await let_events_change(connection)
        await connection.execute(text("DELETE FROM policy_events WHERE version = 1"))
        assert (await version_before(connection, await version(connection, 2))).version == 1
        assert await newest_promoted(connection, "m") == 2


async def test_what_serves_nothing_cannot_be_rolled_back(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0)
        for number in (0, 1):
            one = await version(connection, number)
            with pytest.raises(NotGated, match="only a trained version that serves"):
                await roll_back(connection, one, reason=TEST, actor="operator")


# Episodes of a version that was rolled back: never claimed, and consumed untrained


ALL: Final = ClaimRule(policy="m", group_size=1, groups=9, smallest_group=1, max_age_s=1e-6)
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
    await promote(connection, "m", 1, reason=TEST, actor="trainer")
    for number in (2, 4):
        await promote(connection, "m", number, reason=TEST, actor="trainer")
        await set_state(connection, "m", number, "rolled_back", reason="worse", actor="controller")
        await promote(connection, "m", 3, reason=TEST, actor="controller")


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
        assert await waiting_updates(connection, ALL) == len(KEPT) / ALL.groups


@pytest.mark.parametrize("state", ["rolled_back", "retired"])
async def test_episodes_of_a_rolled_back_version_are_consumed_untrained(
    lost: AsyncEngine, state: str
) -> None:
    async with lost.begin() as connection:
        if state == "retired":
            for number in (2, 4):
                why = {"reason": "idle", "actor": "trainer"}
                await set_state(connection, "m", number, "retired", **why)
        assert await expire(connection, ALL, 3, {}) == {"rolled_back": len(LOST)}
        assert await consumed(connection) == {
            name: "rolled_back" if name in LOST else None for name in HAD
        }
        trained_on = text("SELECT count(*) FROM consumptions WHERE trained")
        assert await connection.scalar(trained_on) == 0
        assert await expire(connection, ALL, 3, {}) == {}
        assert len(await find_ready(connection, ALL, 0)) == len(KEPT)


async def test_they_are_consumed_without_a_reward_too_and_before_others_expire(
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
            smallest_group=1,
            max_age_s=1e9,
            max_staleness=0,
        )
        counted = await expire(connection, short, 4, {})
    # Of those that are kept, "one" and "past-two" began before the version that serves.
    assert counted == {"rolled_back": len(LOST), "stale": 2}


async def test_what_an_update_held_already_is_not_consumed(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0, 1, 1, 3)
        await ingest(connection, records())
    claim = await claimed(engine, ALL, 3)
    assert claim is not None
    async with engine.begin() as connection:
        await roll_back_two(connection)
    with pytest.raises(HoldsRolledBack, match="sampled 5 of its episodes was rolled back"):
        await consume_all(engine, claim, {}, 5)
    async with engine.begin() as connection:
        assert await numbered_version(connection, "m", 5) is None
        assert await release(connection, claim.update_id, "it holds what was rolled back") == 8
    again = await claimed(engine, ALL, 3)
    assert again is not None
    assert set(keys(again)) == KEPT
    await consume_all(engine, again, {}, 5)


async def test_versions_that_were_rolled_back_make_nothing_older(lost: AsyncEngine) -> None:
    rule = ClaimRule(
        policy="m", group_size=1, groups=9, smallest_group=1, max_age_s=1e9, max_staleness=1
    )
    async with lost.begin() as connection:
        # Of 1 and 3 none is more than one version old, whatever came to nothing in between.
        assert await expire(connection, rule, 4, {}) == {"rolled_back": len(LOST)}


async def test_what_serves_may_come_from_a_rolled_back_version(engine: AsyncEngine) -> None:
    """An operator promoted it; what is trained next begins with the base model."""
    async with engine.begin() as connection:
        await trained(connection, 0, 1)
        for number in (1, 2):
            await promote(connection, "m", number, reason=TEST, actor="operator")
        await set_state(connection, "m", 1, "rolled_back", reason="worse", actor="operator")
        assert (await head_of(connection, "m")).version == 0
