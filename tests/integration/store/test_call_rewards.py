"""Episodes whose only rewards are for single calls: scored where the recipe pays these."""

import io
import random
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.credit import explain_past
from pawl.export import export
from store.read.past import past_update
from store.records import CallRecord, FeedbackRecord
from store.selecting import Selection
from tests.integration.store.test_groups import LONG_AGO, PATIENT
from tests.integration.store.test_joins import scores
from tests.support.ledger.any_order import same_in_any_order
from tests.support.ledger.episodes import keys, reasons, store
from tests.support.ledger.updates import claimed, record_update
from tests.support.records import START, call, reward
from trainer.credit.lines import CreditLine, credit_line, credit_lines, read_lines
from trainer.recipes.recipe import Recipe
from trainer.updates.claiming import claim_rule
from trainer.updates.plan import Plan, plan_update

PAID = ("call", "per_agent")
FAILED: dict[str, Any] = {"http_status": 400, "trainable": False, "reason": "incomplete"}


def recipe(assignment: str = "call", group_size: int = 1, **credit: Any) -> Recipe:
    """Single episodes, or groups of `group_size` that do not wait."""
    credit = {"baseline": "none" if group_size == 1 else "group", "air_lambda": 0.0} | credit
    return Recipe.model_validate(
        {
            "claim": {"group_size": group_size, "groups": 1, "max_age_s": PATIENT},
            "credit": {"assignment": assignment, "normalisation": "none"} | credit,
        }
    )


def made(episode: str, **changes: Any) -> CallRecord:
    """A call of an hour ago."""
    return call(episode, **({"started_at": LONG_AGO} | changes))


def given(value: float, of: CallRecord, **when: int) -> FeedbackRecord:
    return reward(value, call=str(of.id), **when)


def just_now(record: FeedbackRecord) -> FeedbackRecord:
    return msgspec.structs.replace(record, at=datetime.now(UTC))


async def taken(engine: AsyncEngine, by: Recipe) -> list[str]:
    return sorted(keys(await claimed(engine, claim_rule(by, "m"))))


async def trained(engine: AsyncEngine, by: Recipe) -> Plan:
    claim = await claimed(engine, claim_rule(by, "m"))
    assert claim is not None
    plan = plan_update(claim, by)
    async with engine.begin() as connection:
        await connection.execute(
            text("UPDATE updates SET recipe = CAST(:recipe AS jsonb) WHERE state = 'running'"),
            {"recipe": by.model_dump_json()},
        )
    await record_update(engine, claim, plan)
    return plan


@pytest.mark.parametrize("assignment", PAID)
async def test_episode_with_call_rewards_is_claimed_and_trained_once(
    engine: AsyncEngine, assignment: str
) -> None:
    first, second = made("e", agent="writer"), made("e", agent="checker")
    await store(engine, first, second, given(1.0, first), given(0.25, second))
    plan = await trained(engine, recipe(assignment))
    assert [(one.r_total, one.weight, one.reason) for one in plan.credited] == [
        (1.0, 0.5, None),
        (0.25, 0.5, None),
    ]
    assert await taken(engine, recipe(assignment)) == []
    assert await reasons(engine) == {"e": None}


async def test_episode_is_not_claimed_if_the_recipe_ignores_call_rewards(
    engine: AsyncEngine,
) -> None:
    one = made("e")
    await store(engine, one, given(1.0, one))
    assert await taken(engine, recipe("identical")) == []


async def test_unscored_calls_have_no_loss_weight(engine: AsyncEngine) -> None:
    first, second = made("e"), made("e")
    await store(engine, first, second, given(1.0, second))
    plan = await trained(engine, recipe())
    assert [(one.r_total, one.weight, one.reason) for one in plan.credited] == [
        (None, 0.0, "unscored"),
        (1.0, 1.0, None),
    ]
    assert plan.outcomes[0].trained


async def test_episode_with_call_rewards_completes_a_group(engine: AsyncEngine) -> None:
    one, other = made("one", task="t"), made("other", task="t")
    await store(engine, one, given(1.0, one), other)
    assert await taken(engine, recipe(group_size=2)) == []
    await store(engine, reward(0.0, episode="other"))
    assert await taken(engine, recipe(group_size=2)) == ["one", "other"]


async def test_late_episode_is_compared_with_trained_members_of_its_group(
    engine: AsyncEngine,
) -> None:
    by = recipe(group_size=2)
    for name, value in (("a", 1.0), ("b", 0.0)):
        one = made(name, task="t")
        await store(engine, one, given(value, one))
    await trained(engine, by)
    late = made("late", task="t")
    await store(engine, late, given(0.25, late))
    rule = msgspec.structs.replace(claim_rule(by, "m"), max_age_s=1e-6, fewest=1)
    claim = await claimed(engine, rule)
    assert keys(claim) == ["late"]
    assert claim is not None
    # Group size 2: filled up with one of them.
    [earlier] = claim.groups[0].earlier
    assert earlier.key in ("a", "b")


# When it is over


async def test_ongoing_episode_with_call_rewards_is_not_claimed(engine: AsyncEngine) -> None:
    first = made("e")
    await store(engine, first, given(1.0, first), made("e", started_at=datetime.now(UTC)))
    assert await taken(engine, recipe()) == []


async def test_episode_with_recent_call_rewards_is_not_claimed_yet(engine: AsyncEngine) -> None:
    first, second = made("e"), made("e")
    await store(engine, first, second, given(1.0, first), just_now(given(1.0, second)))
    assert await taken(engine, recipe()) == []


async def test_episode_reward_makes_an_ongoing_episode_claimable(engine: AsyncEngine) -> None:
    one = made("e", started_at=datetime.now(UTC))
    await store(engine, one, just_now(given(1.0, one)), just_now(reward(0.5, episode="e")))
    assert await taken(engine, recipe()) == ["e"]


async def test_joined_episode_is_claimed_when_all_its_parts_are_over(engine: AsyncEngine) -> None:
    digest = b"3" * 16
    whole = made("whole", method="header", provides=(digest,))
    await store(engine, whole, given(1.0, whole))
    await store(engine, call("part", method="own", needs=(digest,), started_at=datetime.now(UTC)))
    assert await taken(engine, recipe()) == []
    async with engine.begin() as connection:
        await connection.execute(
            text("UPDATE episode_policies SET last_call_at = now() - interval '1 h'")
        )
    assert await taken(engine, recipe()) == ["whole"]


# What is said in which order


async def test_joined_episode_is_scored_alike_in_any_order_of_arrival(engine: AsyncEngine) -> None:
    digest = b"3" * 16
    whole = made("whole", provides=(digest,))
    part = made("part", method="own", needs=(digest,))
    follows = made("part", method="prefix")
    records = [
        whole,
        part,
        follows,
        given(0.5, whole, at=3),
        given(0.7, whole, at=9),
        given(1.0, follows, at=5),
    ]
    # Of the part, an episode of its own, what is said of a call is said of all of it.
    at = [START + timedelta(seconds=seconds) for seconds in (5, 9)]
    found = await same_in_any_order(engine, records, random.Random(0), scores)
    assert found == [("whole", *at, None)]


async def test_newest_call_reward_is_trained_and_a_later_reward_starts_no_update(
    engine: AsyncEngine,
) -> None:
    one = made("e")
    await store(engine, one, given(1.0, one, at=5))
    await store(engine, given(0.25, one, at=1))
    plan = await trained(engine, recipe())
    assert [credit.r_total for credit in plan.credited] == [1.0]
    await store(engine, given(-1.0, one, at=9))
    assert await taken(engine, recipe()) == []


# Failed ones


async def test_failed_episode_with_call_rewards_is_claimed_once(engine: AsyncEngine) -> None:
    first, second, third = made("e"), made("e"), made("e", **FAILED)
    await store(engine, first, second, third, given(1.0, first))
    by = recipe(failed_reward=-1.0)
    plan = await trained(engine, by)
    assert [(one.r_total, one.reason) for one in plan.credited] == [
        (1.0, None),
        (-1.0, None),
        (-1.0, "incomplete"),
    ]
    assert await taken(engine, by) == []


async def test_failed_episode_waits_while_call_rewards_still_arrive(
    engine: AsyncEngine,
) -> None:
    first, second = made("e"), made("e", **FAILED)
    await store(engine, first, second, just_now(given(1.0, first)))
    assert await taken(engine, recipe(failed_reward=-1.0)) == []
    assert await taken(engine, recipe("identical", failed_reward=-1.0)) == ["e"]


# What is told of them


def lines_of(plan: Plan) -> list[CreditLine]:
    return [
        credit_line(one.episode, str(one.call.id), one.call.agent, one) for one in plan.credited
    ]


@pytest.mark.parametrize("assignment", PAID)
async def test_an_export_and_the_update_give_the_same_credit(
    engine: AsyncEngine, assignment: str
) -> None:
    for name, value in (("a", 1.0), ("b", 0.0)):
        calls = [made(name, task="t", agent=agent) for agent in ("writer", "writer", "checker")]
        broken = made(name, task="t", **FAILED)
        await store(engine, *calls, broken, given(value, calls[0]), given(0.5, calls[2]))
    out = io.BytesIO()
    await export(engine, Selection(), out)
    by = recipe(assignment, group_size=2, failed_reward=-1.0)
    told = credit_lines(read_lines(io.BytesIO(out.getvalue()), "export"), by.credit)
    expected = lines_of(await trained(engine, by))
    assert told == expected
    async with engine.connect() as connection:
        past = explain_past(await past_update(connection, 1, "m"))
    assert (list(past.lines), past.notes) == (expected, [])


async def test_export_shows_scored_failed_and_unscored_episodes(engine: AsyncEngine) -> None:
    scored, failed = made("scored"), made("failed")
    await store(engine, scored, failed, made("failed", **FAILED), made("unscored"))
    await store(engine, given(1.0, scored), given(1.0, failed))
    out = io.BytesIO()
    await export(engine, Selection(), out)
    lines = map(msgspec.json.decode, out.getvalue().splitlines())
    assert {line["episode"]: line["state"] for line in lines} == {
        "scored": "scored",
        "failed": "failed",
        "unscored": "unscored",
    }
