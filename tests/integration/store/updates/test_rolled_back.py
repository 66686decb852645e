"""Episodes of a version that was rolled back: never claimed, and consumed untrained."""

from typing import Final

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from store.claims import expire, release
from store.errors import HoldsRolledBack
from store.ready import ClaimRule, find_ready, waiting_updates
from store.records import SpoolRecord
from store.version_queries import head_of, numbered_version
from store.write.ingest import ingest
from tests.support.ledger.lineage import promote, set_state, trained
from tests.support.ledger.updates import claimed, consume_all
from tests.support.records import call, reward

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
    await promote(connection, "m", 1, reason="for the test", actor="trainer")
    for number in (2, 4):
        await promote(connection, "m", number, reason="for the test", actor="trainer")
        await set_state(connection, "m", number, "rolled_back", reason="worse", actor="steward")
        await promote(connection, "m", 3, reason="for the test", actor="steward")


@pytest.fixture
async def lost(engine: AsyncEngine) -> AsyncEngine:
    """Such episodes, of which two versions were rolled back."""
    async with engine.begin() as connection:
        await trained(connection, 0, 1, 1, 3)
        await roll_back_two(connection)
        await ingest(connection, records())
    return engine


async def keys(connection: AsyncConnection) -> dict[str, str | None]:
    """Why each episode was consumed, None while it is free."""
    query = """
        SELECT e.key, c.reason FROM episodes e JOIN episode_policies p ON p.episode_id = e.id
        LEFT JOIN consumptions c ON (c.episode_id, c.policy) = (p.episode_id, p.policy)
    """
    return {row.key: row.reason for row in await connection.execute(text(query))}


async def test_no_update_claims_them(lost: AsyncEngine) -> None:
    claim = await claimed(lost, ALL, 3)
    assert claim is not None
    assert {one.key for group in claim.groups for one in group.episodes} == KEPT
    async with lost.begin() as connection:
        await release(connection, claim.update_id, "for the test")
        assert await waiting_updates(connection, ALL) == len(KEPT) / ALL.groups


@pytest.mark.parametrize("state", ["rolled_back", "retired"])
async def test_they_are_consumed_untrained_with_the_reason(lost: AsyncEngine, state: str) -> None:
    async with lost.begin() as connection:
        if state == "retired":
            for number in (2, 4):
                why = {"reason": "idle", "actor": "trainer"}
                await set_state(connection, "m", number, "retired", **why)
        assert await expire(connection, ALL, 3, {}) == {"rolled_back": len(LOST)}
        assert await keys(connection) == {
            name: "rolled_back" if name in LOST else None for name in HAD
        }
        consumed = text("SELECT count(*) FROM consumptions WHERE trained")
        assert await connection.scalar(consumed) == 0
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
            max_episode_age_s=-1.0,
        )
        counted = await expire(connection, short, 4, {})
    assert counted == {"rolled_back": len(LOST), "aged": len(KEPT)}


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
    assert {one.key for group in again.groups for one in group.episodes} == KEPT
    await consume_all(engine, again, {}, 5)


async def test_versions_that_were_rolled_back_make_nothing_older(lost: AsyncEngine) -> None:
    rule = ClaimRule(
        policy="m", group_size=1, groups=9, smallest_group=1, max_age_s=1e9, max_staleness=1
    )
    async with lost.begin() as connection:
        # Of 1 and 3 none is more than one version old, whatever came to nothing in between.
        assert await expire(connection, rule, 4, {}) == {"rolled_back": len(LOST)}


async def test_what_serves_may_come_from_one_of_them(engine: AsyncEngine) -> None:
    """An operator promoted it; what is trained next begins with the base model."""
    async with engine.begin() as connection:
        await trained(connection, 0, 1)
        for number in (1, 2):
            await promote(connection, "m", number, reason="for the test", actor="operator")
        await set_state(connection, "m", 1, "rolled_back", reason="worse", actor="operator")
        assert (await head_of(connection, "m")).version == 0
