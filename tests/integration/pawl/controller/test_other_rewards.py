"""A policy whose reward becomes another sum: rewards in two units are never compared."""

import asyncio

import pytest
from prometheus_client import generate_latest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.commands.policies import events_of, versions_of
from pawl.controller.gating import Gating
from store.read.gates import gated
from tests.integration.pawl.controller.test_untried import RULE as UNTRIED
from tests.integration.pawl.controller.test_untried import gives, serves
from tests.support.controller.trials import (
    BAD,
    FROM_S,
    GOOD,
    HOUR_S,
    MANY,
    TO_S,
    candidate,
    changes,
    gate,
    live,
    look,
    next_version,
    on_trial,
    pass_time,
    states,
)
from tests.support.ledger.history import let_events_change
from tests.support.ledger.lineage import trained
from tests.support.waiting import eventually
from trainer.recipes.recipe import Recipe
from trainer.updates.versions import score_by

ALONE = Recipe()
# A lead of 0.9 is one of 0.09 by this sum.
LESS = Recipe.model_validate({"reward": {"reward": {"weight": 0.1, "range": [0, 1]}}})
MORE = Recipe.model_validate(
    {
        "reward": {"reward": {"weight": 100, "range": [0, 1]}},
        "gate": {"margin": 20, "reward_range": [0, 100]},
    }
)
WATCHED = 'pawl_controller_gate_watched{policy="m"} '


async def earns(engine: AsyncEngine, recipe: Recipe) -> None:
    """Start a trainer with this recipe."""
    await score_by(engine, "m", recipe)


async def tried(engine: AsyncEngine, judge: Gating) -> None:
    """Try version 1, with episodes of two hours ago that show that it is better."""
    await candidate(engine, 0)
    await judge.look(engine)
    for _ in range(2):
        await pass_time(engine)
    await live(engine, {("serving", 0): BAD, ("canary", 1): GOOD}, from_s=6800.0, to_s=4000.0)


async def hour_passes(engine: AsyncEngine) -> None:
    """Let all that was done, and its events, which nobody else may change, be an hour ago."""
    await pass_time(engine)
    async with engine.begin() as connection:
        await let_events_change(connection)
        earlier = text("UPDATE policy_events SET at = at - make_interval(secs => :s)")
        await connection.execute(earlier, {"s": HOUR_S})


async def why(engine: AsyncEngine) -> object:
    [line] = [one for one in await versions_of(engine, "m") if one.state == "serving"]
    return line.unwatched


async def test_version_is_not_watched_by_another_reward_and_is_again_by_its_own(
    engine: AsyncEngine, judge: Gating
) -> None:
    await on_trial(engine, judge)
    await judge.look(engine)
    await pass_time(engine)
    await live(engine, {("base", 0): BAD, ("serving", 1): GOOD}, "b", many=4 * MANY)
    await judge.look(engine)
    assert WATCHED + "1.0" in generate_latest().decode()
    await earns(engine, LESS)
    # Neither by a controller that reads all again, nor by one that has seen it before.
    for one in (gate(engine), judge):
        await one.look(engine)
        assert await states(engine) == {0: "published", 1: "serving"}
        assert WATCHED + "0.0" in generate_latest().decode()
    assert "reward is another sum" in str(await why(engine))
    assert "pawl policies rollback" in str(await why(engine))
    await earns(engine, ALONE)
    await judge.look(engine)
    assert WATCHED + "1.0" in generate_latest().decode()
    await live(engine, {("base", 0): GOOD, ("serving", 1): BAD}, "c", from_s=TO_S + 10.0, many=100)
    await gate(engine).look(engine)
    assert await states(engine) == {0: "serving", 1: "rolled_back"}


async def test_trial_begins_anew_with_the_reward_and_rests_on_what_began_since(
    engine: AsyncEngine, judge: Gating
) -> None:
    """By the old range all rewards of the new sum would be its highest."""
    await tried(engine, judge)
    await earns(engine, MORE)
    await judge.look(engine)
    assert await states(engine) == {0: "serving", 1: "canary"}
    [last] = (await events_of(engine, "m"))[-1:]
    assert (last.version, last.from_state, last.to_state) == ("m@1", "canary", "canary")
    assert (last.actor, "begins anew" in last.reason) == ("trainer", True)
    # Started again, a trainer changes nothing.
    before = await events_of(engine, "m")
    await earns(engine, MORE)
    assert await events_of(engine, "m") == before
    await pass_time(engine)
    await live(
        engine,
        {("serving", 0): [0.6, 0.7], ("canary", 1): [0.1, 0.2]},
        "b",
        from_s=FROM_S,
        many=100,
    )
    await judge.look(engine)
    assert await states(engine) == {0: "serving", 1: "rolled_back"}


async def test_version_promoted_by_the_new_reward_is_watched_by_it(
    engine: AsyncEngine, judge: Gating
) -> None:
    await tried(engine, judge)
    await earns(engine, MORE)
    await judge.look(engine)
    await pass_time(engine)
    # The episodes of before, 100 times as far apart, would have been a reference of their own.
    await live(engine, {("serving", 0): [0.2, 0.3], ("canary", 1): [0.6, 0.7]}, "b")
    await judge.look(engine)
    assert await states(engine) == {0: "published", 1: "serving"}
    [last] = (await events_of(engine, "m"))[-1:]
    assert isinstance(last.evidence, dict)
    assert last.evidence["decision"]["arms"]["canary"]["mean"] == pytest.approx(65.0)
    await pass_time(engine)
    await live(engine, {("base", 0): [0.2, 0.3], ("serving", 1): [0.6, 0.7]}, "c")
    await judge.look(engine)
    assert WATCHED + "1.0" in generate_latest().decode()
    assert await states(engine) == {0: "published", 1: "serving"}


async def test_untried_versions_are_watched_together_only_if_they_have_one_reward(
    engine: AsyncEngine,
) -> None:
    """What follows the change is what the next version is compared with."""
    async with engine.begin() as connection:
        await trained(connection, 0, 1)
    for number, from_s in ((1, 9500.0), (2, 8900.0)):
        await serves(engine, number)
        far = {("base", 0): BAD, ("serving", number): GOOD}
        await live(engine, far, str(number), from_s=from_s, to_s=from_s - 590.0)
        await hour_passes(engine)
    await look(engine)
    assert WATCHED + "1.0" in generate_latest().decode()
    await earns(engine, LESS)
    await look(engine)
    assert (await states(engine))[2] == "serving"
    assert "reward is another sum" in str(await why(engine))
    rule = UNTRIED.model_copy(update={"margin": 0.02, "reward_range": (0.0, 0.1)})
    await next_version(engine, 3, 2)
    await serves(engine, 3, rule)
    # By as much less as what serves would be rolled back for, were it one line.
    await gives(engine, 3, [0.5, 0.6], BAD)
    await hour_passes(engine)
    await look(engine)
    assert await states(engine) == {0: "published", 1: "published", 2: "published", 3: "serving"}
    assert WATCHED + "0.0" in generate_latest().decode()
    assert "first version by its reward" in str(await why(engine))
    await next_version(engine, 4, 3)
    await serves(engine, 4, rule)
    await gives(engine, 4, BAD, GOOD)
    await hour_passes(engine)
    await look(engine)
    published = dict.fromkeys(range(3), "published")
    assert await states(engine) == published | {3: "serving", 4: "rolled_back"}
    assert (await changes(engine))[-2] == ("m@4", "rolled_back", "controller")


async def test_rewards_become_no_other_sum_in_the_middle_of_a_look(
    engine: AsyncEngine, judge: Gating
) -> None:
    await candidate(engine, 0)
    await judge.look(engine)
    async with engine.begin() as connection:
        before = await gated(connection, "m")
        trainer = asyncio.create_task(earns(engine, LESS))
        await eventually(lambda: somebody_waits(engine))
        assert await gated(connection, "m") == before
    await trainer
    async with engine.connect() as connection:
        after = await gated(connection, "m")
    assert before is not None
    assert after is not None
    assert after.reward == LESS.reward_rule.digest != before.reward


async def somebody_waits(engine: AsyncEngine) -> bool:
    query = (
        "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'reward_terms'::regclass"
    )
    async with engine.connect() as connection:
        return bool(await connection.scalar(text(query)))
