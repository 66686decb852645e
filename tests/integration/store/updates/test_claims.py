"""Claim, release, consume: whole groups, once, by one trainer at a time."""

import asyncio
from uuid import UUID

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine

from store import claims
from store.claim_query import ClaimRule
from store.claims import Claim, Outcome, consume_episodes, end_update
from store.errors import ClaimLost, UnknownPolicy
from store.records import SpoolRecord
from store.version_queries import list_versions
from tests.support.ledger.episodes import keys, store
from tests.support.ledger.lineage import promote, set_state
from tests.support.ledger.updates import claimed, consume_all
from tests.support.records import call, reward
from tests.support.waiting import eventually

RULE = ClaimRule(policy="m", group_size=2, groups=2, max_age_s=1e9)


async def fill(engine: AsyncEngine, tasks: int = 2, members: int = 2, scored: bool = True) -> None:
    records: list[SpoolRecord] = []
    for task in range(tasks):
        for member in range(members):
            name = f"t{task}-{member}"
            records += [call(name, task=f"t{task}"), call(name, task=f"t{task}")]
            if scored:
                records.append(reward(float(member), episode=name))
    await store(engine, *records)


async def take(engine: AsyncEngine, rule: ClaimRule = RULE, parent: int = 0) -> Claim | None:
    return await claimed(engine, rule, parent, {"learner": "grpo"})


async def finish(engine: AsyncEngine, claim: Claim, version: int | None = 1) -> None:
    await consume_all(engine, claim, {"loss": 0.5}, version)


async def test_claim_has_whole_groups_with_all_their_calls(engine: AsyncEngine) -> None:
    await fill(engine)
    claim = await take(engine)
    assert claim is not None
    assert [len(g.episodes) for g in claim.groups] == [2, 2]
    assert all(len(e.calls) == 2 for g in claim.groups for e in g.episodes)


async def test_groups_too_few_for_an_update_are_not_claimed(engine: AsyncEngine) -> None:
    await fill(engine, tasks=1)
    assert await take(engine) is None


async def test_unscored_episodes_are_not_claimed(engine: AsyncEngine) -> None:
    await fill(engine, scored=False)
    assert await take(engine) is None


async def test_incomplete_groups_older_than_max_age_are_claimed(engine: AsyncEngine) -> None:
    # The rewards of these tests were stated long ago.
    await fill(engine, tasks=1)
    rule = ClaimRule(policy="m", group_size=8, groups=9, max_age_s=1e-6, fewest=1)
    claim = await take(engine, rule)
    assert claim is not None
    assert [len(g.episodes) for g in claim.groups] == [2]


async def test_a_claimed_or_consumed_episode_is_not_claimed_again(engine: AsyncEngine) -> None:
    await fill(engine)
    claim = await take(engine)
    assert claim is not None
    assert await take(engine) is None
    await finish(engine, claim)
    assert await take(engine) is None


async def test_released_episodes_can_be_claimed_again(engine: AsyncEngine) -> None:
    await fill(engine)
    claim = await take(engine)
    assert claim is not None
    async with engine.begin() as connection:
        assert await claims.release(connection, claim.update_id, "test") == 4
    again = await take(engine)
    assert again is not None
    assert again.update_id != claim.update_id


async def test_release_after_an_update_ended_frees_no_episode(engine: AsyncEngine) -> None:
    await fill(engine)
    claim = await take(engine)
    assert claim is not None
    await finish(engine, claim)
    async with engine.begin() as connection:
        assert await claims.release(connection, claim.update_id, "test") == 0
    assert await take(engine) is None


async def test_the_same_ledger_gives_the_same_claim(engine: AsyncEngine) -> None:
    await fill(engine, tasks=6)
    found = []
    for _ in range(3):
        claim = await take(engine)
        assert claim is not None
        found.append(claim.groups)
        async with engine.begin() as connection:
            await claims.release(connection, claim.update_id, "test")
    assert found[0] == found[1] == found[2]


async def somebody_waits(engine: AsyncEngine) -> bool:
    """Whether somebody waits for a lock that another connection to this database holds."""
    waiting = (
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    async with engine.connect() as connection:
        return bool(await connection.scalar(text(waiting)))


async def test_claim_waits_for_a_member_locked_by_another_transaction(engine: AsyncEngine) -> None:
    await fill(engine)
    async with engine.connect() as other:
        await other.execute(text("SELECT FROM episodes WHERE key = 't0-1' FOR UPDATE"))
        taking = asyncio.create_task(take(engine))
        await eventually(lambda: somebody_waits(engine))
        assert not taking.done()
        await other.rollback()
    claim = await taking
    assert claim is not None
    assert [len(group.episodes) for group in claim.groups] == [2, 2]


async def test_concurrent_claims_of_a_policy_start_a_single_update(engine: AsyncEngine) -> None:
    await fill(engine, tasks=8)
    found = await asyncio.gather(*[take(engine) for _ in range(4)], return_exceptions=True)
    assert sum(isinstance(claim, Claim) for claim in found) == 1
    assert all(isinstance(f, Claim | ClaimLost) or f is None for f in found)


async def test_an_update_that_was_released_cannot_be_recorded(engine: AsyncEngine) -> None:
    await fill(engine)
    claim = await take(engine)
    assert claim is not None
    async with engine.begin() as connection:
        await claims.release(connection, claim.update_id, "test")
    with pytest.raises(ClaimLost):
        await finish(engine, claim)


async def test_an_episode_is_consumed_once_for_ever(engine: AsyncEngine) -> None:
    await fill(engine)
    claim = await take(engine)
    assert claim is not None
    await finish(engine, claim)
    with pytest.raises((IntegrityError, ClaimLost)):
        await finish(engine, claim, version=2)


async def test_recording_makes_the_version_and_promoting_moves_the_traffic(
    engine: AsyncEngine,
) -> None:
    await fill(engine)
    claim = await take(engine)
    assert claim is not None
    await finish(engine, claim)
    async with engine.begin() as connection:
        assert await claims.next_version(connection, "m") == 2
        [base, new] = await list_versions(connection, "m")
        assert (base.state, new.state, new.served_name) == ("serving", "written", "m@1")
        await promote(connection, "m", 1, reason="for the test", actor="operator")
        states = {v.version: v.state for v in await list_versions(connection, "m")}
        assert states == {0: "retired", 1: "serving"}
        with pytest.raises(UnknownPolicy):
            await set_state(connection, "m", 9, "retired", reason="for the test", actor="operator")


async def test_extra_and_late_episodes_of_a_task_are_claimed_as_the_next_group(
    engine: AsyncEngine,
) -> None:
    await fill(engine, members=3)
    first = await take(engine)
    assert first is not None
    await finish(engine, first)
    assert await take(engine) is None
    records: list[SpoolRecord] = [call("t0-9", task="t0"), reward(1.0, episode="t0-9")]
    records += [call("t1-9", task="t1"), reward(1.0, episode="t1-9")]
    await store(engine, *records)
    second = await take(engine)
    assert second is not None
    assert set(keys(second)) == {"t0-2", "t0-9", "t1-2", "t1-9"}


# Each is consumed once, and never without a reason


SINGLES = ClaimRule(policy="m", group_size=1, groups=3, max_age_s=1e9)


@pytest.fixture
async def running(engine: AsyncEngine) -> tuple[UUID, list[UUID]]:
    """A running update, and the ids of the three episodes that it claimed."""
    records = [[call(f"e{n}"), reward(1.0, episode=f"e{n}")] for n in range(3)]
    await store(engine, *[record for pair in records for record in pair])
    async with engine.begin() as connection:
        update_id = await claims.claim(connection, SINGLES, 0, {})
        assert update_id is not None
        rows = await connection.execute(text("SELECT id FROM episodes ORDER BY key"))
        return update_id, list(rows.scalars())


async def consumed(engine: AsyncEngine) -> list[tuple[UUID, UUID, bool, str | None]]:
    query = text("SELECT episode_id, update_id, trained, reason FROM consumptions")
    async with engine.connect() as connection:
        return sorted((row[0], row[1], row[2], row[3]) for row in await connection.execute(query))


async def test_each_episode_is_consumed_with_its_outcome(
    engine: AsyncEngine, running: tuple[UUID, list[UUID]]
) -> None:
    update_id, [one, other, last] = running
    outcomes = [
        Outcome(episode_id=other, trained=False, reason="alone"),
        Outcome(episode_id=one, trained=True),
        Outcome(episode_id=last, trained=False, reason="no_spread"),
    ]
    async with engine.begin() as connection:
        await consume_episodes(connection, update_id, outcomes)
        await consume_episodes(connection, update_id, [])
    assert await consumed(engine) == sorted(
        (one.episode_id, update_id, one.trained, one.reason) for one in outcomes
    )


async def test_no_outcome_is_stored_if_any_is_refused(
    engine: AsyncEngine, running: tuple[UUID, list[UUID]]
) -> None:
    update_id, [one, other, _] = running
    trained = [Outcome(episode_id=one, trained=True), Outcome(episode_id=other, trained=True)]
    without_reason = [trained[0], Outcome(episode_id=other, trained=False)]
    twice = [*trained, Outcome(episode_id=one, trained=False, reason="alone")]
    for outcomes in (without_reason, twice):
        with pytest.raises(IntegrityError):
            async with engine.begin() as connection:
                await consume_episodes(connection, update_id, outcomes)
    assert await consumed(engine) == []


async def test_an_update_ends_once(engine: AsyncEngine, running: tuple[UUID, list[UUID]]) -> None:
    update_id, _ = running
    async with engine.begin() as connection:
        await end_update(connection, update_id, "abandoned", {"abandoned": "why"})
    with pytest.raises(ClaimLost):
        async with engine.begin() as connection:
            await end_update(connection, update_id, "done", {}, version=1)
    async with engine.connect() as connection:
        [update] = await claims.list_updates(connection)
    assert (update.state, update.version, update.metrics) == (
        "abandoned",
        None,
        {"abandoned": "why"},
    )
    assert update.finished_at is not None
