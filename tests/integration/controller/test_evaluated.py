"""Mode `evaluated`: what an evaluation came to decides before a version has any traffic."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from prometheus_client import generate_latest
from sqlalchemy.ext.asyncio import AsyncEngine
from structlog.testing import capture_logs

from controller.comparison import ComparedEpisode, Comparison
from controller.evaluating import Evaluations
from controller.gate import Gate
from pawl.commands.policies import read_event_lines
from store.read.gates import VersionInRole
from tests.support.controller.trials import (
    RULE,
    changes,
    controller,
    loaded,
    next_version,
    shares,
    states,
)
from tests.support.ledger.lineage import promote
from tests.support.waiting import eventually
from trainer.recipes.recipe import PublishOptions

EVALUATED = {**RULE, "mode": "evaluated"}


class Evaluator:
    """Let each evaluation come to one difference of so many tasks, once it may go on."""

    def __init__(self, difference: float, tasks: int = 100) -> None:
        self.of: list[tuple[int, int]] = []
        self.ended = 0
        self.fails = 0
        self.may_end = asyncio.Event()
        self._difference, self._tasks = difference, tasks

    async def __call__(
        self, candidate: VersionInRole, serving: VersionInRole, rule: PublishOptions
    ) -> Comparison:
        self.of.append((candidate.version.version, serving.version.version))
        if self.fails:
            self.fails -= 1
            raise OSError("the agent does not start")
        try:
            await self.may_end.wait()
        finally:
            self.ended += 1
        comparison = Comparison(rule)
        new, old = (0.5 + sign * self._difference / 2 for sign in (1, -1))
        for _ in range(self._tasks):
            comparison.add_pair([ComparedEpisode("t", new)], [ComparedEpisode("t", old)])
        return comparison

    async def has_begun(self) -> bool:
        """Return whether an evaluation goes on."""
        return len(self.of) > self.ended

    async def has_begun_of(self, count: int) -> bool:
        return len(self.of) == count

    async def has_ended(self) -> bool:
        return len(self.of) == self.ended


async def evaluated(engine: AsyncEngine, judge: Gate, evaluator: Evaluator) -> None:
    """Look until the evaluation has ended, and what it came to is acted on."""
    await judge.look(engine)
    await eventually(evaluator.has_begun)
    await judge.look(engine)
    assert (await states(engine))[1] == "loaded"
    evaluator.may_end.set()
    await eventually(evaluator.has_ended)
    await judge.look(engine)


@pytest.mark.parametrize(
    ("difference", "tasks", "more", "becomes", "child", "verdict"),
    [
        pytest.param(0.4, 100, {}, "serving", "written", "better", id="better"),
        pytest.param(-0.4, 100, {}, "rejected", "rejected", "worse", id="worse"),
        pytest.param(0.01, 3, {}, "serving", "written", "undecided", id="undecided"),
        pytest.param(-0.2, 3, {}, "retired", "written", "undecided", id="undecided-and-lower"),
        pytest.param(0.4, 0, {}, "retired", "written", "undecided", id="nothing-scored"),
        pytest.param(
            *(0.01, 3, {"undecided": "keep"}, "retired", "written", "undecided"), id="keep"
        ),
    ],
)
async def test_evaluation_decides_about_a_version_before_it_has_traffic(
    engine: AsyncEngine,
    difference: float,
    tasks: int,
    more: Mapping[str, Any],
    becomes: str,
    child: str,
    verdict: str,
) -> None:
    evaluator = Evaluator(difference, tasks)
    await loaded(engine, 0, rule={**EVALUATED, **more})
    await next_version(engine, 2, 1)
    await evaluated(engine, controller(engine, evaluator), evaluator)
    serving = "retired" if becomes == "serving" else "serving"
    assert await states(engine) == {0: serving, 1: becomes, 2: child}
    assert await shares(engine) == ({0: RULE["control_share"]} if becomes == "serving" else {})
    [event] = [line for line in await read_event_lines(engine, "m") if line.evidence]
    assert isinstance(event.evidence, dict)
    assert (event.version, event.to_state) == ("m@1", becomes)
    assert event.evidence["verdict"] == verdict
    assert evaluator.of == [(1, 0)]


async def test_evaluated_version_waits_for_approval_with_a_single_event(
    engine: AsyncEngine,
) -> None:
    evaluator = Evaluator(0.4)
    judge = controller(engine, evaluator)
    await loaded(engine, 0, rule={**EVALUATED, "approve": True})
    await evaluated(engine, judge, evaluator)
    await judge.look(engine)
    assert await changes(engine) == [("m@1", "loaded")]
    assert "pawl policies promote" in (await read_event_lines(engine, "m"))[-1].reason
    # A controller that has lost what it came to does not decide anew.
    lost = Evaluator(0.4, 0)
    lost.may_end.set()
    for _ in range(3):
        await controller(engine, lost).look(engine)
    assert await states(engine) == {0: "serving", 1: "loaded"}
    assert lost.of == []


async def test_newer_versions_do_not_stop_an_evaluation_and_the_newest_is_next(
    engine: AsyncEngine,
) -> None:
    evaluator = Evaluator(-0.4)
    judge = controller(engine, evaluator)
    await loaded(engine, 0, rule=EVALUATED)
    for number in (2, 3):
        await judge.look(engine)
        await next_version(engine, number, 0, EVALUATED)
    await evaluated(engine, judge, evaluator)
    assert await states(engine) == {0: "serving", 1: "rejected", 2: "retired", 3: "loaded"}
    await judge.look(engine)
    await eventually(lambda: evaluator.has_begun_of(2))
    assert evaluator.of == [(1, 0), (3, 0)]


async def test_evaluation_ends_if_another_version_serves_meanwhile(engine: AsyncEngine) -> None:
    evaluator = Evaluator(0.4)
    judge = controller(engine, evaluator)
    await loaded(engine, 0, rule=EVALUATED)
    await next_version(engine, 2, 0, EVALUATED)
    await judge.look(engine)
    async with engine.begin() as connection:
        await promote(connection, "m", 2)
    await next_version(engine, 3, 2, EVALUATED)
    for _ in range(3):
        await judge.look(engine)
    await eventually(lambda: evaluator.has_begun_of(2))
    assert evaluator.of == [(1, 0), (3, 2)]
    assert evaluator.ended == 1
    assert await states(engine) == {0: "retired", 1: "retired", 2: "serving", 3: "loaded"}


async def test_failed_evaluation_is_retried_and_logged_once(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.evaluating.RETRY_S", 0.5)
    evaluator = Evaluator(0.4)
    evaluator.fails = 3
    evaluator.may_end.set()
    await loaded(engine, 0, rule=EVALUATED)
    judge = controller(engine, evaluator)

    async def is_promoted() -> bool:
        await judge.look(engine)
        return (await states(engine))[1] == "serving"

    with capture_logs() as logs:
        await eventually(is_promoted)
    [failed] = [one for one in logs if one["event"] == "policy_not_judged"]
    assert "the agent does not start" in str(failed["exc_info"])
    assert len(evaluator.of) == 4


async def test_version_not_evaluated_in_time_is_retired_and_failure_is_shown(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.evaluating.RETRY_S", 0.0)
    evaluator = Evaluator(0.4)
    evaluator.fails = 10**9
    await loaded(engine, 0, rule={**EVALUATED, "decide_within_h": 1e-4})
    judge = controller(engine, evaluator)

    async def is_shown() -> bool:
        await judge.look(engine)
        return 'gate_failed{policy="m"} 1.0' in generate_latest().decode()

    async def is_retired() -> bool:
        await judge.look(engine)
        return (await states(engine))[1] == "retired"

    await eventually(is_shown)
    await eventually(is_retired)
    assert "nothing was scored" in (await read_event_lines(engine, "m"))[-1].reason
    await judge.look(engine)
    assert not await is_shown()


async def test_evaluations_end_with_the_controller(engine: AsyncEngine) -> None:
    evaluator = Evaluator(0.4)
    evaluations = Evaluations(evaluator)
    await loaded(engine, 0, rule=EVALUATED)
    await Gate(evaluations).look(engine)
    await eventually(evaluator.has_begun)
    await evaluations.close()
    assert evaluator.ended == 1
