"""Several policies in one episode: each claims it once for itself, whoever called first."""

from collections.abc import Sequence
from itertools import permutations
from typing import Any, Final

import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from store import claims
from store.adapter_slots import versions_kept_for_episodes
from store.claim_query import ClaimRule
from store.claims import NON_FINITE, Claim, end_unusable_claim, expire_episodes
from store.database import driver_of
from store.link.joins import TOO_LATE
from store.questions import pinned_episodes, pinned_version
from store.records import CallRecord, SpoolRecord
from store.version_states import ensure_base
from store.write.ingest import Ingester
from tests.support.ledger.episodes import keys
from tests.support.ledger.lineage import add_in_state
from tests.support.ledger.updates import claimed, consume_all
from tests.support.records import call, reward
from trainer.recipes.recipe import Recipe
from trainer.updates.plan import plan_update

OUTSIDE: Final = {"agent": "rewriter", "policy": None, "policy_version": None, "trainable": False}
POLICIES: Final = ("writes", "checks")


def rule(policy: str, **changes: Any) -> ClaimRule:
    fields = {"group_size": 2, "groups": 1, "max_age_s": 1e9}
    return ClaimRule(policy=policy, **fields | changes)


def calls_of(key: str, order: Sequence[str], **changes: Any) -> list[CallRecord]:
    """A call of each agent, in this order."""
    agents: dict[str, dict[str, Any]] = {
        "writer": {"agent": "writer", "policy": "writes", "policy_version": 1},
        "checker": {"agent": "checker", "policy": "checks", "policy_version": 3},
        "rewriter": OUTSIDE | {"reason": "no_policy"},
    }
    return [call(key, task="t", **agents[agent] | changes) for agent in order]


async def store(engine: AsyncEngine, *records: SpoolRecord) -> None:
    await Ingester().store(engine, records)
    async with engine.begin() as connection:
        for policy in POLICIES:
            await ensure_base(connection, policy)


async def take(engine: AsyncEngine, policy: str, **changes: Any) -> Claim | None:
    return await claimed(engine, rule(policy, **changes), 3)


async def must_take(engine: AsyncEngine, policy: str, **changes: Any) -> Claim:
    claim = await take(engine, policy, **changes)
    assert claim is not None
    return claim


async def rows(engine: AsyncEngine, columns: str, where: str = "true") -> list[tuple[Any, ...]]:
    query = (
        f"SELECT e.key, p.policy, {columns} FROM episode_policies p"
        " JOIN episodes e ON e.id = p.episode_id LEFT JOIN consumptions c"
        f" ON (c.episode_id, c.policy) = (p.episode_id, p.policy) WHERE {where} ORDER BY 1, 2"
    )
    async with engine.connect() as connection:
        return [tuple(row) for row in await connection.execute(text(query))]


async def two_episodes(engine: AsyncEngine, order: Sequence[str]) -> None:
    said = [reward(1.0, episode="e1"), reward(0.0, episode="e0")]
    await store(engine, *calls_of("e0", order), *calls_of("e1", order), *said)


@pytest.mark.parametrize("order", list(permutations(["writer", "checker", "rewriter"])))
async def test_each_trained_policy_claims_the_episode_once_in_any_order_of_calls(
    engine: AsyncEngine, order: Sequence[str]
) -> None:
    await two_episodes(engine, order)
    for policy, agent, version in (("writes", "writer", 1), ("checks", "checker", 3)):
        claim = await must_take(engine, policy)
        assert keys(claim) == ["e0", "e1"]
        plan = plan_update(claim, Recipe())
        # All three agents' calls are one episode with one return; one agent's calls carry loss.
        assert len(plan.credited) == 6
        assert {credit.r_total for credit in plan.credited} == {0.0, 1.0}
        assert [(row.agent, row.version) for row in plan.rows] == [(agent, version)] * 2
        assert {row.advantage > 0 for row in plan.rows} == {True, False}
        await consume_all(engine, claim)
        assert await take(engine, policy) is None
    spent = [(key, policy, True) for key in ("e0", "e1") for policy in sorted(POLICIES)]
    assert await rows(engine, "c.trained") == spent


async def test_episode_that_only_an_outside_model_answered_is_claimable_for_no_policy(
    engine: AsyncEngine,
) -> None:
    await two_episodes(engine, ["rewriter"])
    assert await rows(engine, "p.version") == []


async def test_a_policy_without_a_version_is_not_in_training(engine: AsyncEngine) -> None:
    fixed = {"policy": "fixed", "policy_version": None, "trainable": False, "reason": "no_policy"}
    await store(engine, call("e", **fixed), *calls_of("e", ["writer"]))
    assert await rows(engine, "p.version") == [("e", "writes", 1)]


async def test_releasing_a_policys_update_leaves_another_policys_claim(engine: AsyncEngine) -> None:
    await two_episodes(engine, ["writer", "checker"])
    written, checked = await must_take(engine, "writes"), await must_take(engine, "checks")
    async with engine.begin() as connection:
        assert await claims.release(connection, written.update_id, "test") == 2
    assert keys(await take(engine, "writes")) == ["e0", "e1"]
    await consume_all(engine, checked)
    assert await rows(engine, "c.trained", "c.trained") == [
        ("e0", "checks", True),
        ("e1", "checks", True),
    ]


async def test_episode_that_expires_for_a_policy_stays_claimable_for_another(
    engine: AsyncEngine,
) -> None:
    await two_episodes(engine, ["checker", "writer"])
    async with engine.begin() as connection:
        await add_in_state(connection, "writes", 2, "retired")
        counted = await expire_episodes(
            connection, rule("writes", max_staleness=0, max_age_s=0.0), 2, {}
        )
    assert counted == {"stale": 2}
    assert await rows(engine, "c.reason", "c.reason IS NOT NULL") == [
        ("e0", "writes", "stale"),
        ("e1", "writes", "stale"),
    ]
    assert keys(await take(engine, "checks")) == ["e0", "e1"]


@pytest.mark.parametrize("reason", ["damaged", NON_FINITE])
async def test_episode_set_aside_by_a_policy_stays_claimable_for_others_unless_damaged(
    engine: AsyncEngine, reason: str
) -> None:
    await two_episodes(engine, ["writer", "checker"])
    claim = await must_take(engine, "writes")
    [bad, _] = claim.groups[0].episodes
    async with engine.begin() as connection:
        assert await end_unusable_claim(connection, claim.update_id, {bad.id: "why"}, reason) == 1
    assert await rows(engine, "c.reason", "c.reason IS NOT NULL") == [(bad.key, "writes", reason)]
    left = keys(await take(engine, "checks", group_size=1, max_age_s=1e-6, fewest=1))
    assert left == (["e1"] if reason == "damaged" else ["e0"])


async def test_late_calling_policy_claims_episodes_consumed_by_another(engine: AsyncEngine) -> None:
    await two_episodes(engine, ["writer"])
    await consume_all(engine, await must_take(engine, "writes"))
    await store(engine, *calls_of("e0", ["checker", "writer"]), *calls_of("e1", ["checker"]))
    assert keys(await take(engine, "checks")) == ["e0", "e1"]
    assert await take(engine, "writes") is None


async def test_late_group_member_is_compared_with_members_consumed_by_the_same_policy(
    engine: AsyncEngine,
) -> None:
    await two_episodes(engine, ["writer", "checker"])
    await consume_all(engine, await must_take(engine, "writes"))
    late = [*calls_of("late", ["checker", "writer"]), reward(0.5, episode="late")]
    await store(engine, *late)
    claim = await must_take(engine, "writes", max_age_s=1e-6, fewest=1, group_size=3)
    assert keys(claim) == ["late"]
    assert [e.key for e in claim.groups[0].earlier] == ["e0", "e1"]
    claim = await must_take(engine, "checks", max_age_s=1e-6, fewest=1, group_size=3)
    assert keys(claim) == ["e0", "e1", "late"]
    assert claim.groups[0].earlier == ()


# Joins

SAID: Final = (b"1" * 16,)


def halves(version: int = 1) -> list[CallRecord]:
    """Two episodes that are one: an outside model began it, and two policies go on."""
    first = call("first", method="own", provides=SAID, task="t", **OUTSIDE, reason="no_policy")
    own = {"method": "own", "needs": SAID}
    [second, third] = calls_of("second", ["writer", "checker"])
    changes = {"policy_version": version}
    return [
        first,
        msgspec.structs.replace(second, **own, **changes),
        msgspec.structs.replace(third, method="response"),
    ]


@pytest.mark.parametrize("turned", [False, True])
async def test_joined_episode_is_claimed_by_the_policies_of_all_its_parts(
    engine: AsyncEngine, turned: bool
) -> None:
    records = [*halves(), reward(1.0, episode="second")]
    for record in reversed(records) if turned else records:
        await store(engine, record)
    free = "p.claimable AND p.scored_at IS NOT NULL"
    assert await rows(engine, "p.version, p.own_version", free) == [
        ("first", "checks", 3, None),
        ("first", "writes", 1, None),
    ]
    for policy in POLICIES:
        claim = await must_take(engine, policy, group_size=1, max_age_s=1e-6, fewest=1)
        assert [len(e.calls) for e in claim.groups[0].episodes] == [3]
        await consume_all(engine, claim)
    assert len(await rows(engine, "c.trained", "c.trained")) == 2


async def test_undone_join_takes_the_parts_policies_from_the_joined_episode(
    engine: AsyncEngine,
) -> None:
    await store(engine, *halves())
    assert len(await rows(engine, "p.version", "p.claimable")) == 2
    # Now nine episodes provide what the second one repeats, so it is no evidence about any.
    common = [call(f"c{n}", method="own", provides=SAID, policy_version=0) for n in range(9)]
    await store(engine, *common)
    assert [row for row in await rows(engine, "p.version") if row[0] == "first"] == []
    assert [row[0] for row in await rows(engine, "p.version", "p.claimable")] == [
        f"c{n}" for n in range(9)
    ]


async def test_later_part_does_not_join_an_episode_that_a_policy_claimed(
    engine: AsyncEngine,
) -> None:
    [first, second, third] = halves()
    [written] = calls_of("first", ["writer"])
    await store(engine, first, written, reward(1.0, episode="first"))
    assert keys(await take(engine, "writes", group_size=1)) == ["first"]
    await store(engine, second, third)
    assert await rows(engine, "p.claimable") == [
        ("first", "writes", True),
        ("second", "checks", False),
        ("second", "writes", False),
    ]
    query = text("SELECT quarantined_reason FROM episodes WHERE key = 'second'")
    async with engine.connect() as connection:
        assert await connection.scalar(query) == TOO_LATE


# Versions


async def test_an_episode_keeps_its_version_of_each_policy(engine: AsyncEngine) -> None:
    await store(engine, *calls_of("e", ["checker", "writer"]), *halves(version=2))
    async with engine.begin() as connection:
        driver = await driver_of(connection)
        pins = {(policy, key): v for policy, key, v in await pinned_episodes(driver, 10)}
        assert pins == {
            ("writes", "e"): 1,
            ("checks", "e"): 3,
            ("writes", "first"): 2,
            ("checks", "first"): 3,
            ("writes", "second"): 2,
            ("checks", "second"): 3,
        }
        for (policy, key), version in pins.items():
            assert await pinned_version(driver, policy, key) == version
        assert await pinned_version(driver, "m", "e") is None


async def test_version_of_each_policy_is_in_use_while_an_episode_that_it_served_goes_on(
    engine: AsyncEngine,
) -> None:
    await store(engine, *calls_of("e", ["writer", "checker"]))
    async with engine.begin() as connection:
        for version in (2, 3):
            await add_in_state(connection, "checks", version, "retired", ago_s=3600.0)
        kept = await versions_kept_for_episodes(connection, "checks")
    assert {one.version: one.is_under_way for one in kept} == {2: False, 3: True}
