"""A policy whose reward becomes another sum: rewards in two units are never compared."""

from collections.abc import Mapping, Sequence
from datetime import datetime

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from controller.evidence import Evidence
from controller.gate import Gate
from pawl.commands.policies import read_event_lines
from store.records import Arm
from tests.support.controller.trials import (
    BAD,
    GOOD,
    begin_trial,
    controller,
    live,
    on_trial,
    pass_time,
    serves,
    states,
)
from tests.support.ledger.lineage import trained
from trainer.recipes.recipe import Recipe
from trainer.updates.versions import apply_rules

# A difference of 0.01 is one of 1 by this sum.
MORE = Recipe.model_validate(
    {
        "reward": {"reward": {"weight": 100, "range": [0, 1]}},
        "publish": {"margin": 20, "reward_range": [0, 100]},
    }
)
Arms = dict[tuple[Arm, int], Sequence[float]]


async def earns(engine: AsyncEngine) -> None:
    """Start a trainer with another sum."""
    await apply_rules(engine, "m", MORE)


async def test_changed_reward_restarts_a_trial_on_new_episodes_only(
    engine: AsyncEngine, judge: Gate
) -> None:
    """By the old range all rewards of the new sum would be its highest."""
    await begin_trial(engine, judge)
    await pass_time(engine)
    better: Arms = {("serving", 0): BAD, ("canary", 1): GOOD}
    await live(engine, better, from_s=6800.0, to_s=4000.0)
    await earns(engine)
    await judge.look(engine)
    assert await states(engine) == {0: "serving", 1: "canary"}
    [last] = (await read_event_lines(engine, "m"))[-1:]
    assert (last.version, last.from_state, last.to_state) == ("m@1", "canary", "canary")
    assert (last.actor, "comparisons restart" in last.reason) == ("trainer", True)
    # Started again, a trainer changes nothing.
    before = await read_event_lines(engine, "m")
    await earns(engine)
    assert await read_event_lines(engine, "m") == before
    await pass_time(engine)
    worse: Arms = {("serving", 0): [0.6, 0.7], ("canary", 1): [0.1, 0.2]}
    await live(engine, worse, "b")
    await judge.look(engine)
    assert await states(engine) == {0: "serving", 1: "rolled_back"}
    lost = (await read_event_lines(engine, "m"))[-1].evidence
    assert isinstance(lost, dict)
    assert lost["figures"]["new"]["mean"] == pytest.approx(15.0)


async def test_changed_reward_restarts_a_watch_on_new_episodes_only(
    engine: AsyncEngine,
) -> None:
    async with engine.begin() as connection:
        await trained(connection)
    await serves(engine, 1, 0)
    await pass_time(engine)
    worse: Arms = {("control", 0): GOOD, ("serving", 1): BAD}
    await live(engine, worse, from_s=6800.0, to_s=4000.0)
    await earns(engine)
    await controller(engine).look(engine)
    assert await states(engine) == {0: "retired", 1: "serving"}
    await pass_time(engine)
    await live(engine, worse, "b")
    await controller(engine).look(engine)
    assert await states(engine) == {0: "serving", 1: "rolled_back"}


async def test_gate_decides_nothing_while_the_policys_reward_changes(
    engine: AsyncEngine, judge: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    await on_trial(engine, judge)
    catch_up = Evidence.catch_up

    async def earn_first(
        self: Evidence, connection: AsyncConnection, given: Mapping[Arm, set[int]], now: datetime
    ) -> bool:
        monkeypatch.setattr(Evidence, "catch_up", catch_up)
        await earns(engine)
        return await catch_up(self, connection, given, now)

    monkeypatch.setattr(Evidence, "catch_up", earn_first)
    for _ in range(2):
        await judge.look(engine)
    assert await states(engine) == {0: "serving", 1: "canary"}
    assert Evidence.catch_up is catch_up
