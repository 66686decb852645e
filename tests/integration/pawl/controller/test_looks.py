"""Looks under faults: slow, killed, several at once, without a database, beside an operator."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
from prometheus_client import generate_latest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from structlog.testing import capture_logs

import pawl.controller.gating
from pawl.controller import evidence
from pawl.controller.evidence import LookTooLong
from pawl.controller.gating import Gating
from store import version_states
from store.read.gates import Gated, gated
from store.version_queries import list_versions
from store.version_states import freeze
from tests.support.controller.trials import (
    candidate,
    changes,
    following,
    gate,
    live,
    next_version,
    on_trial,
    pass_time,
    states,
)
from tests.support.faults.killing import Killed, killing
from tests.support.ledger.lineage import promote
from tests.support.waiting import eventually, until

Standing = Callable[[AsyncConnection, str], Awaitable[Gated | None]]


async def state_of_a(engine: AsyncEngine) -> str:
    async with engine.connect() as connection:
        return (await list_versions(connection, "a"))[1].state


def where_a(does: Callable[[AsyncConnection], Awaitable[Any]]) -> Standing:
    """What reads where a policy stands, and does this of `a`."""

    async def read(connection: AsyncConnection, name: str) -> Gated | None:
        if name == "a":
            await does(connection)
        return await gated(connection, name)

    return read


def shows(value: float) -> bool:
    return f'pawl_controller_gate_failed{{policy="a"}} {value}' in generate_latest().decode()


async def test_look_that_takes_too_long_is_called_so_and_hinders_no_other_policy(
    engine: AsyncEngine, judge: Gating, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(_: AsyncConnection) -> None:
        await asyncio.Event().wait()

    await candidate(engine, 0, name="a")
    await candidate(engine, 0)
    with capture_logs() as logs, monkeypatch.context() as patched:
        patched.setattr("pawl.controller.gating.gated", where_a(hang))
        patched.setattr("pawl.controller.evidence.LOOK_S", 5.0)
        await judge.look(engine)
    assert (await states(engine))[1] == "canary"
    [said] = [one for one in logs if one["log_level"] == "error"]
    assert (said["event"], said["policy"]) == ("policy_not_judged", "a")
    assert isinstance(said["exc_info"], LookTooLong)
    assert "given up after 5 s, though the database had let it begin" in str(said["exc_info"])
    assert not [one for one in logs if one["event"] == "gate_waits_for_database"]
    assert shows(1.0)
    await judge.look(engine)
    assert await state_of_a(engine) == "canary"
    assert shows(0.0)


async def test_policy_whose_look_the_database_ends_lets_the_others_be_judged_first(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database gives queries of its role a time, as some do: that is as if it went away."""

    async def too_long(connection: AsyncConnection) -> None:
        await connection.execute(text("SET LOCAL statement_timeout = 1"))
        await connection.execute(text("SELECT pg_sleep(60)"))

    async def is_tried() -> bool:
        return (await states(engine))[1] == "canary"

    await candidate(engine, 0, name="a")
    await candidate(engine, 0)
    monkeypatch.setattr("pawl.controller.gating.gated", where_a(too_long))
    async with following(gate(engine)):
        await eventually(is_tried, within_s=120.0)
    assert await state_of_a(engine) == "candidate"


async def test_controller_that_starts_anew_reads_no_more_in_a_look_than_others_can_wait_for(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what is tried, and of what serves."""
    read = evidence.arm_episodes
    parts: list[None] = []

    async def counted(*words: Any, **more: Any) -> Any:
        parts.append(None)
        return await read(*words, **more)

    async def look_until(state: str) -> int:
        """Let a new controller look until version 1 has that state; the most that a look read."""
        judge, most, looks = gate(engine), 0, 0
        while (await states(engine))[1] != state:
            parts.clear()
            await judge.look(engine)
            most, looks = max(most, len(parts)), looks + 1
            assert looks < 40
        return most

    await on_trial(engine, gate(engine))
    monkeypatch.setattr("pawl.controller.evidence.READ_S", 0.0, raising=False)
    monkeypatch.setattr("pawl.controller.evidence.PART", timedelta(minutes=10))
    monkeypatch.setattr("pawl.controller.evidence.arm_episodes", counted)
    # What ends one reading, and what begins the next.
    assert await look_until("serving") == 2
    await pass_time(engine)
    await live(engine, {("base", 0): [0.9, 1.0], ("serving", 1): [0.1, 0.0]}, "falls")
    assert await look_until("rolled_back") <= 2


async def freezes(connection: AsyncConnection) -> None:
    await freeze(connection, "m", frozen=True, reason="for the test", actor="operator")


async def promotes_another(connection: AsyncConnection) -> None:
    await promote(connection, "m", 2)


@pytest.mark.parametrize("does", [freezes, promotes_another])
@pytest.mark.parametrize("better", [True, False])
async def test_look_does_not_undo_what_an_operator_did_meanwhile(
    engine: AsyncEngine,
    judge: Gating,
    monkeypatch: pytest.MonkeyPatch,
    does: Callable[[AsyncConnection], Awaitable[None]],
    better: bool,
) -> None:
    await on_trial(engine, judge, better=better)
    await next_version(engine, 2, 0)
    read = evidence.arm_episodes

    async def meanwhile(*words: Any, **more: Any) -> Any:
        if done:
            done.pop()
            async with engine.begin() as connection:
                await does(connection)
        return await read(*words, **more)

    done = [None]
    monkeypatch.setattr("pawl.controller.evidence.arm_episodes", meanwhile)
    before = await states(engine)
    await judge.look(engine)
    assert not done
    after = before if does is freezes else {0: "published", 1: "canary", 2: "serving"}
    assert await states(engine) == after


async def test_candidate_is_not_tried_of_a_policy_that_is_frozen_meanwhile(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def frozen_then(connection: AsyncConnection, name: str) -> Gated | None:
        found = await gated(connection, name)
        if reads:
            reads.pop()
            async with engine.begin() as other:
                await freezes(other)
        return found

    await candidate(engine, 0)
    reads = [None]
    monkeypatch.setattr("pawl.controller.gating.gated", frozen_then)
    await gate(engine).look(engine)
    assert not reads
    assert (await states(engine))[1] == "candidate"


async def test_failure_that_is_no_outage_is_not_called_one(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(_: object) -> None:
        raise ValueError("for the test")

    monkeypatch.setattr("pawl.controller.gating.gated_policies", broken)

    with capture_logs() as logs:
        async with following(gate(engine)):
            await until(lambda: bool(logs), within_s=120.0)
    assert [one["event"] for one in logs] == ["gate_fails"]


async def test_several_controllers_make_each_change_once(engine: AsyncEngine) -> None:
    controllers = [gate(engine) for _ in range(3)]
    await on_trial(engine, controllers[0])
    for _ in range(3):
        await asyncio.gather(*(one.look(engine) for one in controllers))
    assert await states(engine) == {0: "published", 1: "serving"}
    assert (await changes(engine))[1:] == [
        ("m@0", "published", "controller"),
        ("m@1", "serving", "controller"),
    ]


@pytest.mark.parametrize("better", [True, False])
@pytest.mark.parametrize("when", ["before", "in the middle", "before the commit"])
async def test_controller_killed_in_a_change_leaves_nothing_half_done(
    engine: AsyncEngine, judge: Gating, monkeypatch: pytest.MonkeyPatch, when: str, better: bool
) -> None:
    await on_trial(engine, judge, better)
    if when == "in the middle":
        kill = killing(version_states, "change_state", after=True)
    else:
        name = "promote" if better else "roll_back"
        kill = killing(pawl.controller.gating, name, after=when == "before the commit")
    kill(monkeypatch)
    with pytest.raises(Killed):
        await judge.look(engine)
    assert await states(engine) == {0: "serving", 1: "canary"}
    assert len(await changes(engine)) == 1
    await gate(engine).look(engine)
    made = [("m@0", "published"), ("m@1", "serving")] if better else [("m@1", "rolled_back")]
    assert (await changes(engine))[1:] == [(*change, "controller") for change in made]


async def test_judging_goes_on_once_the_database_is_back(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await on_trial(engine, gate(engine))
    refused = asyncio.Event()

    async def away(_: object) -> None:
        refused.set()
        raise ConnectionRefusedError

    async def promoted() -> bool:
        return (await states(engine))[1] == "serving"

    real = pawl.controller.gating.gated_policies
    monkeypatch.setattr("pawl.controller.gating.gated_policies", away)
    async with following(gate(engine)):
        await refused.wait()
        monkeypatch.setattr("pawl.controller.gating.gated_policies", real)
        await eventually(promoted)
