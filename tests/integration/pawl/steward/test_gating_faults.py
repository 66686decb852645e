"""The gate under faults: stewards at once or killed, no database; each change is made, and once."""

import asyncio

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

import pawl.steward.gating
from store import version_states
from store.version_states import make_candidate
from tests.support.faults.killing import Killed, killing
from tests.support.ledger.lineage import trained
from tests.support.steward.trials import candidate, changes, gate, on_trial, states
from tests.support.waiting import eventually


async def test_several_stewards_make_each_change_once(
    database_url: str, engine: AsyncEngine
) -> None:
    stewards = [gate(database_url) for _ in range(3)]
    await on_trial(engine, stewards[0])
    for _ in range(3):
        await asyncio.gather(*(one.look(engine) for one in stewards))
    assert await states(engine) == {0: "published", 1: "serving"}
    assert (await changes(engine))[1:] == [
        ("m@0", "published", "steward"),
        ("m@1", "serving", "steward"),
    ]


KILLS = {
    "before": killing(pawl.steward.gating, "promote", after=False),
    "in the middle": killing(version_states, "change_state", after=True),
    "before the commit": killing(pawl.steward.gating, "promote", after=True),
}


@pytest.mark.parametrize("when", ["before", "before the commit"])
async def test_a_steward_killed_while_it_promotes_leaves_nothing_half_done(
    database_url: str, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    judge = gate(database_url)
    await on_trial(engine, judge)
    KILLS[when](monkeypatch)
    with pytest.raises(Killed):
        await judge.look(engine)
    assert await states(engine) == {0: "serving", 1: "canary"}
    assert len(await changes(engine)) == 1
    await gate(database_url).look(engine)
    assert await states(engine) == {0: "published", 1: "serving"}
    assert len(await changes(engine)) == 3


async def test_a_steward_killed_while_it_rolls_back_leaves_nothing_half_done(
    database_url: str, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = gate(database_url)
    await on_trial(engine, judge, better=False)
    KILLS["in the middle"](monkeypatch)
    with pytest.raises(Killed):
        await judge.look(engine)
    assert await states(engine) == {0: "serving", 1: "canary"}
    await judge.look(engine)
    assert await states(engine) == {0: "serving", 1: "rolled_back"}
    assert (await changes(engine))[1:] == [("m@1", "rolled_back", "steward")]


async def test_judging_goes_on_once_the_database_is_back(
    database_url: str, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await on_trial(engine, gate(database_url))
    refused = asyncio.Event()

    async def away(_: object) -> None:
        refused.set()
        raise ConnectionRefusedError

    async def promoted() -> bool:
        return (await states(engine))[1] == "serving"

    with monkeypatch.context() as patched:
        patched.setattr("pawl.steward.gating.gated_policies", away)
        following = asyncio.create_task(gate(database_url).follow())
        await refused.wait()
    await eventually(promoted)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_a_policy_that_cannot_be_judged_hinders_no_other(
    database_url: str, engine: AsyncEngine
) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0, name="broken")
        await make_candidate(connection, "broken", 1, {"margin": "much"}, reason="probed")
    await candidate(engine, 0)
    judge = gate(database_url)
    await judge.look(engine)
    await judge.look(engine)
    assert (await states(engine))[1] == "canary"
