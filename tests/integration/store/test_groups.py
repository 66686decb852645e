"""Groups as they come from production: of one, uneven, late, failed, and too many."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from store import claims
from store.claim_query import ClaimRule
from store.claims import Claim, expire_episodes, oldest_trainable_version
from store.read.agreement import trust_in_judges
from store.records import Tokens
from tests.support.ledger.episodes import keys, reasons, store
from tests.support.ledger.lineage import State, add_in_state
from tests.support.ledger.updates import claimed, consume_all
from tests.support.records import call, reward, statement
from trainer.recipes.recipe import ClaimOptions, CreditOptions, Recipe
from trainer.updates.claiming import FAILED_AFTER_S, claim_rule
from trainer.updates.plan import Plan, plan_update

# Rewards in these tests were stated long ago; what must not have waited says so.
PATIENT = 1e9
SINGLE = ClaimRule(policy="m", group_size=1, groups=3, max_age_s=PATIENT)
SHORT = ClaimRule(policy="m", group_size=4, groups=1, max_age_s=1e-6, fewest=1)


async def episode(
    engine: AsyncEngine, key: str, value: float | None = None, at: int = 0, **changes: Any
) -> None:
    await store(engine, call(key, **changes))
    if value is not None:
        await store(engine, reward(value, episode=key, at=at))


async def versions(engine: AsyncEngine, *states: State) -> None:
    async with engine.begin() as connection:
        for version, state in enumerate(states, 1):
            await add_in_state(connection, "m", version, state, parent=version - 1)


async def expired(engine: AsyncEngine, rule: ClaimRule, parent: int = 0) -> dict[str, int]:
    async with engine.begin() as connection:
        return await expire_episodes(connection, rule, parent, {})


# Groups of one


async def test_single_episodes_are_claimed_with_or_without_a_task(engine: AsyncEngine) -> None:
    without_ids = {"tokens": Tokens(), "trainable": False, "reason": "no_token_ids"}
    await episode(engine, "e0", 1.0, **without_ids)
    for number, task in enumerate(["a", "a", "b"], 1):
        await episode(engine, f"e{number}", 1.0, at=number, task=task)
    claim = await claimed(engine, SINGLE)
    assert keys(claim) == ["e0", "e1", "e2"]
    assert claim is not None
    assert [group.task for group in claim.groups] == ["", "a"]


async def test_too_few_episodes_for_an_update_are_not_claimed_at_any_age(
    engine: AsyncEngine,
) -> None:
    await episode(engine, "e", 1.0)
    assert await claimed(engine, ClaimRule(**fields(SINGLE, max_age_s=1e-6))) is None
    assert keys(await claimed(engine, ClaimRule(**fields(SINGLE, fewest=1)))) == ["e"]


def fields(rule: ClaimRule, **changes: Any) -> dict[str, Any]:
    return {name: getattr(rule, name) for name in rule.__struct_fields__} | changes


# Freshness


async def test_episodes_of_newer_versions_are_claimed_first(engine: AsyncEngine) -> None:
    await versions(engine, "retired", "serving")
    for number, version in enumerate([0, 2, 1, 2]):
        await episode(engine, f"e{number}", 1.0, at=number, policy_version=version)
    assert sorted(keys(await claimed(engine, SINGLE, parent=2))) == ["e1", "e2", "e3"]


async def test_groups_of_newer_versions_come_first(engine: AsyncEngine) -> None:
    await versions(engine, "serving")
    for task, version in (("old", 0), ("new", 1)):
        for member in range(2):
            name = f"{task}{member}"
            await episode(engine, name, float(member), task=task, policy_version=version)
    rule = ClaimRule(**fields(SHORT, group_size=2, max_age_s=PATIENT))
    assert keys(await claimed(engine, rule, parent=1)) == ["new0", "new1"]


async def test_extra_members_of_a_task_wait_for_the_next_group(engine: AsyncEngine) -> None:
    for member in range(9):
        await episode(engine, f"e{member}", float(member), at=member, task="t")
    claim = await claimed(engine, ClaimRule(**fields(SHORT, max_age_s=PATIENT)))
    assert keys(claim) == ["e0", "e1", "e2", "e3"]


# Opinions of judges


@pytest.mark.parametrize("right", [0, 1])
async def test_episode_scored_only_by_a_judge_is_claimed_if_the_judge_is_trusted(
    engine: AsyncEngine, right: int
) -> None:
    for place in range(24):
        await episode(engine, f"e{place:02}", float(place % 2), at=place)
        # It is right about each, or says the same of all.
        opinion = float(place % 2) if right else 1.0
        await store(engine, statement("reward", opinion, source="j", episode=f"e{place:02}"))
    await episode(engine, "alone")
    await store(engine, statement("reward", 1.0, at=99, source="j", episode="alone"))
    claim = await claimed(engine, ClaimRule(**fields(SINGLE, groups=25, fewest=1)))
    assert claim is not None
    assert ("alone" in keys(claim)) == bool(right)
    assert claim.trust == {"j": float(right)}
    async with engine.begin() as connection:
        # What it was compared with is gone: it is trusted as it was.
        await connection.execute(text("DELETE FROM feedback WHERE source IS NULL"))
        assert await trust_in_judges(connection, "m") == {"j": float(right)}
    # A fact beside it counts, whatever the judge says; a withdrawn one does not.
    if not right:
        await store(engine, statement("reward", None, at=100, episode="alone"))
        await store(engine, statement("reward", 1.0, at=101, source="j", episode="alone"))
        assert await claimed_next(engine, claim) is None
        await store(engine, reward(0.0, episode="alone", at=102))
        assert keys(await claimed(engine, ClaimRule(**fields(SINGLE, fewest=1)))) == ["alone"]


async def claimed_next(engine: AsyncEngine, claim: Claim) -> Claim | None:
    await consume_all(engine, claim)
    return await claimed(engine, ClaimRule(**fields(SINGLE, fewest=1)))


# Late members


async def consumed_group(engine: AsyncEngine, values: Sequence[float] = (0.0, 0.5, 1.0)) -> None:
    for member, value in enumerate(values):
        await episode(engine, f"early{member}", value, at=member, task="t")
    claim = await claimed(engine, SHORT)
    assert claim is not None
    assert all(group.earlier == () for group in claim.groups)
    await consume_all(engine, claim)


async def test_late_group_member_is_claimed_with_consumed_members_for_comparison(
    engine: AsyncEngine,
) -> None:
    await consumed_group(engine)
    await episode(engine, "late", 1.0, task="t")
    claim = await claimed(engine, SHORT)
    assert keys(claim) == ["late"]
    assert claim is not None
    [group] = claim.groups
    assert sorted(one.key for one in group.earlier) == ["early0", "early1", "early2"]
    await consume_all(engine, claim)
    assert set(await reasons(engine)) == {"early0", "early1", "early2", "late"}


async def test_late_group_member_is_not_claimed_before_max_age(
    engine: AsyncEngine,
) -> None:
    await consumed_group(engine)
    await episode(engine, "late", 1.0, task="t")
    assert await claimed(engine, ClaimRule(**fields(SHORT, max_age_s=PATIENT))) is None


async def test_lone_group_member_is_claimed_after_max_age(engine: AsyncEngine) -> None:
    await consumed_group(engine)
    await episode(engine, "lone", 1.0, task="other")
    assert await claimed(engine, ClaimRule(**fields(SHORT, max_age_s=PATIENT))) is None
    assert keys(await claimed(engine, SHORT)) == ["lone"]


async def test_late_group_members_advantage_includes_consumed_members(engine: AsyncEngine) -> None:
    await consumed_group(engine, values=(0.0, 0.0, 0.0))
    await episode(engine, "late", 1.0, task="t")
    claim = await claimed(engine, SHORT)
    assert claim is not None
    plan = plan_update(claim, Recipe(credit=CreditOptions(air_lambda=0.0)))
    [credit] = plan.credited
    # Four returns 0, 0, 0, 1: mean 1/4, sample variance 1/4.
    assert credit.advantage == pytest.approx((1 - 0.25) / 0.5, abs=1e-12)
    assert (credit.weight, len(plan.rows), plan.metrics["earlier_members"]) == (1.0, 1, 3)


async def test_claim_of_a_finished_update_can_be_loaded_again(engine: AsyncEngine) -> None:
    await consumed_group(engine)
    await episode(engine, "late", 1.0, task="t")
    claim = await claimed(engine, SHORT)
    assert claim is not None
    await consume_all(engine, claim)
    await episode(engine, "later", 0.0, task="t")
    later = await claimed(engine, SHORT)
    assert later is not None
    await consume_all(engine, later)
    async with engine.connect() as connection:
        assert await claims.load_claim(connection, claim.update_id) == claim


# Groups without spread, and failed episodes


def plan_of(claim: Claim | None, **credit: Any) -> Plan:
    assert claim is not None
    return plan_update(claim, Recipe(credit=CreditOptions.model_validate(credit)))


async def test_group_without_spread_is_counted_and_not_trained(
    engine: AsyncEngine,
) -> None:
    for member in range(3):
        await episode(engine, f"e{member}", 1.0, task="t")
    plan = plan_of(await claimed(engine, SHORT))
    assert plan.rows == ()
    assert plan.metrics["dropped"] == {"no_spread": 3}


FAILED = ClaimRule(**fields(SINGLE, groups=1, failed_after_s=60.0))
LONG_AGO = datetime.now(UTC) - timedelta(hours=1)


async def test_failed_episode_without_new_calls_is_claimed_if_the_rule_takes_failures(
    engine: AsyncEngine,
) -> None:
    broken: dict[str, Any] = {"http_status": 400}
    await episode(engine, "failed", started_at=LONG_AGO, task="t", **broken)
    await episode(engine, "just failed", **broken)
    await episode(engine, "went on", started_at=LONG_AGO, **broken)
    await episode(engine, "went on", started_at=LONG_AGO)
    assert await claimed(engine, SINGLE) is None
    claim = await claimed(engine, FAILED)
    assert keys(claim) == ["failed"]
    plan = plan_of(claim, baseline="none", failed_reward=-1.0)
    assert [credit.r_total for credit in plan.credited] == [-1.0]


@pytest.mark.parametrize(
    "lost",
    [
        {"status": "upstream_error", "http_status": None},
        {"status": "upstream_error", "http_status": 502},
        {"status": "truncated"},
        {"status": "client_gone"},
        {"http_status": 429},
        {"http_status": 404},
    ],
)
async def test_episode_lost_by_the_infrastructure_is_not_claimed_as_failed(
    engine: AsyncEngine, lost: dict[str, Any]
) -> None:
    await episode(engine, "lost", started_at=LONG_AGO, task="t", **lost)
    assert await claimed(engine, FAILED) is None


async def test_failed_episode_completes_a_group(engine: AsyncEngine) -> None:
    broken: dict[str, Any] = {
        "http_status": 400,
        "started_at": LONG_AGO,
    }
    await episode(engine, "good", 1.0, task="t", started_at=LONG_AGO)
    await episode(engine, "failed", task="t", **broken)
    rule = ClaimRule(**fields(SHORT, group_size=2, max_age_s=PATIENT, failed_after_s=60.0))
    assert sorted(keys(await claimed(engine, rule))) == ["failed", "good"]


async def test_last_part_of_a_joined_episode_decides_whether_it_failed(
    engine: AsyncEngine,
) -> None:
    made: dict[str, Any] = {"method": "own", "started_at": LONG_AGO}
    broken: dict[str, Any] = {"http_status": 400}
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [("a", {}, broken), ("b", broken, {})]
    for name, first, last in cases:
        digest = name.encode() * 16
        await store(engine, call(f"{name}0", provides=(digest,), **made, **first))
        await store(engine, call(f"{name}1", needs=(digest,), **made, **last))
    assert keys(await claimed(engine, FAILED)) == ["a0"]


async def test_claim_rule_takes_no_failed_episodes_if_failures_are_unscored(
    engine: AsyncEngine,
) -> None:
    part = ClaimOptions(group_size=1, groups=1)
    unscored = CreditOptions(baseline="none", failed_reward="unscored")
    none = Recipe(claim=part, credit=unscored)
    some = Recipe(claim=part, credit=CreditOptions(baseline="none"))
    assert claim_rule(none, "m").failed_after_s is None
    assert claim_rule(some, "m").failed_after_s == FAILED_AFTER_S


# The moving baselines


async def test_update_starts_from_the_moving_baselines_of_the_last_finished_update(
    engine: AsyncEngine,
) -> None:
    found = []
    for number in range(3):
        for member in range(3):
            await episode(engine, f"e{number}{member}", 1.0)
        claim = await claimed(engine, SINGLE)
        assert claim is not None
        found.append(claim.baselines)
        if number == 1:
            async with engine.begin() as connection:
                await claims.release(connection, claim.update_id, "test")
        else:
            await consume_all(engine, claim, baselines={"number": number})
    assert found == [None, {"number": 0}, {"number": 0}]
    async with engine.connect() as connection:
        [first, *_] = await claims.list_updates(connection, "m")
        again = await claims.load_claim(connection, first.id)
    assert again.baselines is None


async def test_moving_baselines_of_an_update_are_used_by_the_next_update(
    engine: AsyncEngine,
) -> None:
    recipe = Recipe(
        claim=ClaimOptions(group_size=1, groups=3),
        credit=CreditOptions(normalisation="none", air_lambda=0.0),
    )
    advantages = []
    for number, values in enumerate([(0.0, 0.5, 1.0), (1.0, 1.0, 1.0)]):
        for member, value in enumerate(values):
            await episode(engine, f"e{number}{member}", value, task=f"t/{number}{member}")
        claim = await claimed(engine, claim_rule(recipe, "m"))
        assert claim is not None
        plan = plan_update(claim, recipe)
        advantages.append([credit.advantage for credit in plan.credited])
        await consume_all(engine, claim, baselines=plan.baselines)
    assert sorted(map(float, filter(None, advantages[0]))) == [-0.5, 0.5]
    # As many returns again: the mean of all six is ¾.
    assert advantages[1] == [0.25, 0.25, 0.25]


# What can never be trained any more

LIMITED = ClaimRule(**fields(SINGLE, max_staleness=1))


async def test_stale_episodes_are_spent_with_a_reason(engine: AsyncEngine) -> None:
    await versions(engine, "retired", "retired", "serving")
    await episode(engine, "stale", 1.0, policy_version=1)
    await episode(engine, "stale, unscored", policy_version=0)
    await episode(engine, "fresh", 1.0, policy_version=2)
    await episode(engine, "open", policy_version=3)
    assert await expired(engine, LIMITED, parent=3) == {"stale": 2}
    assert await expired(engine, LIMITED, parent=3) == {}
    assert await reasons(engine) == {"stale": "stale", "stale, unscored": "stale"}
    async with engine.connect() as connection:
        [*_, last] = await claims.list_updates(connection, "m")
    assert (last.state, last.version) == ("expired", None)
    assert last.metrics["dropped"] == {"stale": 2}


async def test_stale_episode_is_not_claimed_even_before_it_is_consumed(engine: AsyncEngine) -> None:
    await versions(engine, "retired", "retired", "serving")
    await episode(engine, "stale", 1.0, policy_version=1)
    rule = ClaimRule(**fields(LIMITED, max_age_s=1e-6))
    assert await claimed(engine, rule, parent=3) is None


async def test_episodes_never_expire_without_limits(engine: AsyncEngine) -> None:
    await versions(engine, *["retired"] * 9)
    await episode(engine, "old", 1.0, started_at=LONG_AGO)
    assert await expired(engine, SINGLE, parent=9) == {}


async def test_rejected_versions_do_not_count_for_staleness(engine: AsyncEngine) -> None:
    await versions(engine, "retired", "rejected", "rejected", "rejected", "serving")
    async with engine.connect() as connection:
        found = [
            await oldest_trainable_version(connection, "m", 5, staleness)
            for staleness in (0, 1, 2, 9)
        ]
        unlimited = await oldest_trainable_version(connection, "m", 5, None)
    assert found == [5, 1, 0, 0]
    assert unlimited == 0


async def test_doubtful_or_claimed_episodes_do_not_expire(engine: AsyncEngine) -> None:
    await versions(engine, "retired", "serving")
    await episode(engine, "doubtful", 1.0, policy_version=0, confidence="doubtful")
    await episode(engine, "claimed", 1.0, policy_version=0)
    assert keys(await claimed(engine, ClaimRule(**fields(SINGLE, groups=1)), parent=2)) == [
        "claimed"
    ]
    rule = ClaimRule(**fields(SINGLE, max_staleness=0))
    assert await expired(engine, rule, parent=2) == {}
