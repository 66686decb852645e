"""Looks under faults: slow, killed, several at once, without a database, beside an operator."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from typing import Any

import pytest
from prometheus_client import generate_latest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from structlog.testing import capture_logs

from controller import evidence, gate
from controller.gate import Gate
from store import version_states
from store.read.gates import GatedPolicy, read_gated_policy
from store.version_queries import list_versions
from store.version_states import freeze
from tests.support.controller.trials import (
    BAD,
    GOOD,
    IMMEDIATE,
    RULE,
    changes,
    controller,
    following,
    live,
    loaded,
    next_version,
    on_trial,
    serves,
    states,
)
from tests.support.faults.killing import Killed, killing
from tests.support.ledger.lineage import promote
from tests.support.waiting import eventually, until

Reads = Callable[[AsyncConnection, str], Awaitable[GatedPolicy | None]]


async def state_of_a(engine: AsyncEngine) -> str:
    async with engine.connect() as connection:
        return (await list_versions(connection, "a"))[1].state


def where_a(does: Callable[[AsyncConnection], Awaitable[Any]]) -> Reads:
    """Return what reads where a policy stands, and does this of `a`."""

    async def read(connection: AsyncConnection, name: str) -> GatedPolicy | None:
        if name == "a":
            await does(connection)
        return await read_gated_policy(connection, name)

    return read


def is_shown_as_failed(name: str) -> bool:
    return f'pawl_controller_gate_failed{{policy="{name}"}} 1.0' in generate_latest().decode()


async def hang(_: AsyncConnection) -> None:
    await asyncio.Event().wait()


async def test_slow_decision_about_a_policy_is_logged_and_delays_no_other_policy(
    engine: AsyncEngine, judge: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    await loaded(engine, 0, name="a")
    await loaded(engine, 0)
    with capture_logs() as logs, monkeypatch.context() as patched:
        patched.setattr(gate, "read_gated_policy", where_a(hang))
        patched.setattr(gate, "LOOK_LIMIT_S", 5.0)
        await judge.look(engine)
    assert (await states(engine))[1] == "canary"
    [error] = [one for one in logs if one["log_level"] == "error"]
    assert (error["event"], error["policy"]) == ("policy_not_judged", "a")
    assert isinstance(error["exc_info"], TimeoutError)
    assert "longer than 5 s and was cancelled" in str(error["exc_info"])
    assert is_shown_as_failed("a")
    await judge.look(engine)
    assert await state_of_a(engine) == "canary"
    assert not is_shown_as_failed("a")


async def test_unreadable_gate_rule_is_logged_once_and_delays_no_other_policy(
    engine: AsyncEngine, judge: Gate
) -> None:
    await loaded(engine, 0, name="a", rule={**RULE, "margin": "none"})
    await loaded(engine, 0)
    with capture_logs() as logs:
        await judge.look(engine)
        await judge.look(engine)
    assert (await states(engine))[1] == "canary"
    [error] = [one for one in logs if one["log_level"] == "error"]
    assert (error["event"], error["policy"]) == ("policy_not_judged", "a")
    assert "a@1" in str(error["exc_info"])
    assert "\nmargin\n" in str(error["exc_info"])
    assert is_shown_as_failed("a")


async def test_query_about_a_policy_cancelled_by_the_database_delays_no_other_policy(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database gives queries of its role a time, as some do: that is as if it went away."""

    async def too_long(connection: AsyncConnection) -> None:
        await connection.execute(text("SET LOCAL statement_timeout = 1"))
        await connection.execute(text("SELECT pg_sleep(60)"))

    async def is_tried() -> bool:
        return (await states(engine))[1] == "canary"

    await loaded(engine, 0, name="a")
    await loaded(engine, 0)
    monkeypatch.setattr(gate, "read_gated_policy", where_a(too_long))
    async with following(engine, controller(engine)):
        await eventually(is_tried, within_s=120.0)
    assert await state_of_a(engine) == "loaded"


@pytest.mark.parametrize("compared", ["trial", "watch"])
async def test_long_read_of_evidence_is_split_over_several_rounds_of_the_controller(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, compared: str
) -> None:
    """It reads no more at once than other policies can wait for."""
    read = evidence.arm_episodes
    parts: list[None] = []

    async def counted(*words: Any, **more: Any) -> Any:
        parts.append(None)
        return await read(*words, **more)

    judge, wanted = controller(engine), "rolled_back"
    if compared == "trial":
        await on_trial(engine, judge)
        wanted = "serving"
    else:
        await loaded(engine, 0)
        await serves(engine, 2, 0)
        await live(engine, {("control", 0): GOOD, ("serving", 2): BAD})
    monkeypatch.setattr(evidence, "READ_S", 0.0)
    monkeypatch.setattr(evidence, "LONGEST_SPAN", timedelta(minutes=10))
    monkeypatch.setattr(evidence, "LONGEST_PAST", timedelta(minutes=10))
    monkeypatch.setattr(evidence, "arm_episodes", counted)
    version, looks, most = (1 if compared == "trial" else 2), 0, 0
    while (await states(engine))[version] != wanted:
        parts.clear()
        await judge.look(engine)
        most, looks = max(most, len(parts)), looks + 1
        assert looks < 40
    assert looks >= 3
    assert most == 1


async def freezes(connection: AsyncConnection) -> None:
    await freeze(connection, "m", frozen=True, reason="for the test", actor="operator")


async def promotes_another(connection: AsyncConnection) -> None:
    await promote(connection, "m", 2)


@pytest.mark.parametrize("does", [freezes, promotes_another])
@pytest.mark.parametrize("better", [True, False])
async def test_gate_decision_does_not_undo_an_operators_concurrent_change(
    engine: AsyncEngine,
    judge: Gate,
    monkeypatch: pytest.MonkeyPatch,
    does: Callable[[AsyncConnection], Awaitable[None]],
    better: bool,
) -> None:
    mine, others = (GOOD, BAD) if better else (BAD, GOOD)
    await on_trial(engine, judge, mine=mine, others=others)
    await next_version(engine, 2, 0)
    read = evidence.arm_episodes

    async def meanwhile(*words: Any, **more: Any) -> Any:
        if done:
            done.pop()
            async with engine.begin() as connection:
                await does(connection)
        return await read(*words, **more)

    done = [None]
    monkeypatch.setattr(evidence, "arm_episodes", meanwhile)
    before = await states(engine)
    await judge.look(engine)
    assert not done
    after = before if does is freezes else {0: "retired", 1: "retired", 2: "serving"}
    assert await states(engine) == after


async def test_policy_frozen_during_a_gate_decision_gets_no_canary(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def frozen_then(connection: AsyncConnection, name: str) -> GatedPolicy | None:
        found = await read_gated_policy(connection, name)
        if reads:
            reads.pop()
            async with engine.begin() as other:
                await freezes(other)
        return found

    await loaded(engine, 0)
    reads = [None]
    monkeypatch.setattr(gate, "read_gated_policy", frozen_then)
    await controller(engine).look(engine)
    assert not reads
    assert (await states(engine))[1] == "loaded"


async def test_failure_of_the_gate_other_than_a_database_outage_is_logged_as_gate_fails(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(_: object) -> None:
        raise ValueError("for the test")

    monkeypatch.setattr(gate, "gated_policies", broken)
    with capture_logs() as logs:
        async with following(engine, controller(engine)):
            await until(lambda: bool(logs), within_s=120.0)
    assert [one["event"] for one in logs] == ["gate_fails"]


async def test_several_controllers_make_each_change_of_a_versions_state_once(
    engine: AsyncEngine,
) -> None:
    controllers = [controller(engine) for _ in range(3)]
    await on_trial(engine, controllers[0])
    for _ in range(3):
        await asyncio.gather(*(one.look(engine) for one in controllers))
    assert await changes(engine) == [("m@1", "canary"), ("m@0", "retired"), ("m@1", "serving")]


async def test_several_controllers_move_the_control_once(engine: AsyncEngine) -> None:
    controllers = [controller(engine) for _ in range(3)]
    await loaded(engine, 0, rule=IMMEDIATE)
    await serves(engine, 2, 1)
    await serves(engine, 3, 2)
    await live(engine, {("control", 0): BAD, ("serving", 3): GOOD}, many=160)
    for _ in range(3):
        await asyncio.gather(*(one.look(engine) for one in controllers))
    assert await changes(engine) == [("m@2", "retired")]


async def begins(engine: AsyncEngine, judge: Gate) -> None:
    await loaded(engine, 0)


async def is_better(engine: AsyncEngine, judge: Gate) -> None:
    await on_trial(engine, judge)


async def is_worse(engine: AsyncEngine, judge: Gate) -> None:
    await on_trial(engine, judge, mine=BAD, others=GOOD)


async def falls(engine: AsyncEngine, judge: Gate) -> None:
    await loaded(engine, 0, rule=IMMEDIATE)
    await serves(engine, 2, 1)
    await live(engine, {("control", 0): GOOD, ("serving", 2): BAD})


@pytest.mark.parametrize(
    ("due", "function", "made"),
    [
        (begins, "begin_canary", {"m@1": "canary"}),
        (is_better, "promote", {"m@0": "retired", "m@1": "serving"}),
        (is_worse, "roll_back", {"m@1": "rolled_back"}),
        (falls, "roll_back", {"m@2": "rolled_back", "m@0": "serving"}),
    ],
)
@pytest.mark.parametrize("when", ["before", "in the middle", "before the commit"])
async def test_controller_killed_during_a_change_of_state_leaves_nothing_half_done(
    engine: AsyncEngine,
    judge: Gate,
    monkeypatch: pytest.MonkeyPatch,
    due: Callable[[AsyncEngine, Gate], Awaitable[None]],
    function: str,
    made: Mapping[str, str],
    when: str,
) -> None:
    await due(engine, judge)
    before, done = await states(engine), await changes(engine)
    if when == "in the middle" and due is not is_worse:
        kill = killing(version_states, "change_state", after=True)
    else:
        kill = killing(gate, function, after=when == "before the commit")
    kill(monkeypatch)
    with pytest.raises(Killed):
        await judge.look(engine)
    assert await states(engine) == before
    assert await changes(engine) == done
    await controller(engine).look(engine)
    assert dict((await changes(engine))[len(done) :]) == made


async def test_gate_decides_again_after_a_database_outage(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await on_trial(engine, controller(engine))
    refused = asyncio.Event()

    async def away(_: object) -> None:
        refused.set()
        raise ConnectionRefusedError

    async def promoted() -> bool:
        return (await states(engine))[1] == "serving"

    real = gate.gated_policies
    monkeypatch.setattr(gate, "gated_policies", away)
    async with following(engine, controller(engine)):
        await refused.wait()
        monkeypatch.setattr(gate, "gated_policies", real)
        await eventually(promoted)
    assert await states(engine) == {0: "retired", 1: "serving"}
