"""The serving version is compared with its control, an earlier version, and rolled back to it.

No trainer runs in any of these tests, and no model server.
"""

from typing import Any

import pytest
from prometheus_client import generate_latest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from controller.gate import Gate
from pawl.commands.policies import read_event_lines
from store.version_queries import why_held
from store.version_states import freeze, mark_unloaded
from tests.support.controller.trials import (
    BAD,
    GOOD,
    IMMEDIATE,
    MANY,
    RULE,
    changes,
    live,
    look,
    next_version,
    pass_time,
    serves,
    shares,
    states,
)
from tests.support.ledger.lineage import promote, trained

FAIR = [0.6, 0.5]


@pytest.fixture
async def _began(engine: AsyncEngine) -> None:
    """The policy has its base model."""
    async with engine.begin() as connection:
        await trained(connection)


pytestmark = pytest.mark.usefixtures("_began")


def is_watched() -> bool:
    return 'pawl_controller_gate_watched{policy="m"} 1.0' in generate_latest().decode()


async def test_reward_drop_rolls_back_every_version_since_the_control(
    engine: AsyncEngine, judge: Gate
) -> None:
    """Before any episode of a bad version counts, others have followed it."""
    for number in (1, 2, 3):
        await serves(engine, number, number - 1)
    await next_version(engine, 4, 3)
    await next_version(engine, 5, 0)
    assert await shares(engine) == {0: RULE["control_share"]}
    await live(engine, {("control", 0): GOOD, ("serving", 3): BAD})
    await judge.look(engine)
    fallen = dict.fromkeys((1, 2, 3), "rolled_back")
    after = {0: "serving", **fallen, 4: "rejected", 5: "written"}
    assert await states(engine) == after
    events: Any = [
        line for line in await read_event_lines(engine, "m") if line.actor == "controller"
    ]
    assert sorted(line.version for line in events) == ["m@0", "m@1", "m@2", "m@3", "m@4"]
    [lost] = [line for line in events if line.version == "m@3"]
    assert lost.reason == "scores lower than the old version"
    figures = lost.evidence["figures"]
    assert figures["worse"] >= figures["worse_needed"]
    assert (figures["new"]["mean"], figures["old"]["mean"]) == pytest.approx((0.05, 0.95))
    # Nothing more happens.
    await judge.look(engine)
    await look(engine)
    assert await states(engine) == after
    assert await shares(engine) == {}


async def test_successive_versions_are_judged_by_their_pooled_episodes(
    engine: AsyncEngine, judge: Gate
) -> None:
    """The controller has seen some of them before the next one serves."""
    few = MANY // 8
    for number in (1, 2, 3, 4):
        await serves(engine, number, number - 1)
        to_s = 3300.0 - 600.0 * number
        arms: Any = {("control", 0): GOOD, ("serving", number): BAD}
        await live(engine, arms, str(number), to_s + 500.0, few, to_s=to_s)
        state = (await states(engine))[number]
        assert state == "serving"
        if number == 2:
            await judge.look(engine)
            assert (await states(engine))[2] == "serving"
    await judge.look(engine)
    assert await states(engine) == {0: "serving", **dict.fromkeys((1, 2, 3, 4), "rolled_back")}


async def test_version_that_turns_bad_as_it_serves_is_rolled_back(
    engine: AsyncEngine, judge: Gate
) -> None:
    await serves(engine, 1, 0)
    await live(engine, {("control", 0): BAD, ("serving", 1): GOOD}, "a", to_s=1400.0)
    await live(engine, {("control", 0): GOOD, ("serving", 1): BAD}, "b", from_s=1300.0)
    await judge.look(engine)
    assert await states(engine) == {0: "serving", 1: "rolled_back"}


async def test_reward_drop_in_both_arms_rolls_nothing_back(
    engine: AsyncEngine, judge: Gate
) -> None:
    await serves(engine, 1, 0)
    await live(engine, {("control", 0): FAIR, ("serving", 1): GOOD}, "a", to_s=1400.0)
    await live(engine, {("control", 0): BAD, ("serving", 1): BAD}, "b", from_s=1300.0)
    await judge.look(engine)
    assert await states(engine) == {0: "retired", 1: "serving"}
    assert is_watched()


async def moved(engine: AsyncEngine, judge: Gate) -> None:
    """Let four versions serve, of which none has enough episodes to be compared by itself."""
    for number in (1, 2, 3, 4):
        await serves(engine, number, number - 1)
        to_s = 3300.0 - 600.0 * number
        arms: Any = {("control", 0): FAIR, ("serving", number): GOOD}
        await live(engine, arms, str(number), to_s + 500.0, 50, to_s=to_s)
        await judge.look(engine)
    await judge.look(engine)


async def test_control_moves_on_with_pooled_evidence_of_later_versions(
    engine: AsyncEngine, judge: Gate
) -> None:
    await moved(engine, judge)
    [control] = await shares(engine)
    assert control in {1, 2, 3}
    assert (await shares(engine))[control] == RULE["control_share"]
    assert (f"m@{control}", "retired") in await changes(engine)
    before = await changes(engine)
    # Whoever begins now comes to the same.
    await look(engine)
    assert await changes(engine) == before


async def test_roll_back_returns_to_the_moved_control(engine: AsyncEngine, judge: Gate) -> None:
    """Versions that were better than the first control prove nothing for one that is worse."""
    await moved(engine, judge)
    [control] = await shares(engine)
    await serves(engine, 5, 4)
    await live(engine, {("control", control): GOOD, ("serving", 5): FAIR}, "5", many=300)
    await judge.look(engine)
    found = await states(engine)
    assert found[control] == "serving"
    assert {found[one] for one in range(control)} == {"retired"}
    assert {found[one] for one in range(control + 1, 6)} == {"rolled_back"}


@pytest.mark.parametrize(("control", "ends"), [(BAD, "serving"), (GOOD, "rolled_back")])
async def test_reward_drop_over_time_holds_training_until_the_control_decides(
    engine: AsyncEngine, judge: Gate, control: list[float], ends: str
) -> None:
    """The world got worse for all; or the version alone did."""

    async def is_held() -> bool:
        async with engine.connect() as connection:
            return await why_held(connection, "m") is not None

    await serves(engine, 1, 0)
    await live(engine, {("control", 0): GOOD, ("serving", 1): GOOD}, "a", to_s=1900.0, many=100)
    await live(engine, {("serving", 1): FAIR}, "b", from_s=1800.0, to_s=1500.0, many=100)
    await judge.look(engine)
    assert await is_held()
    assert await shares(engine) == {0: 0.5}
    arms: Any = {("control", 0): control, ("serving", 1): BAD}
    await live(engine, arms, "c", from_s=1400.0, many=200)
    await look(engine)
    assert not await is_held()
    assert (await states(engine))[1] == ends


async def fall_and_hold(engine: AsyncEngine, judge: Gate) -> None:
    """Let the rewards of what serves fall, so that training is held."""
    await serves(engine, 1, 0)
    await live(engine, {("control", 0): GOOD, ("serving", 1): GOOD}, "a", to_s=1400.0, many=100)
    await live(engine, {("serving", 1): FAIR}, "b", from_s=1300.0, many=100)
    await judge.look(engine)
    async with engine.connect() as connection:
        assert await why_held(connection, "m") is not None


async def test_hold_on_training_ends_if_no_server_can_load_the_control(
    engine: AsyncEngine, judge: Gate
) -> None:
    """Nothing new could serve, so nothing would ever tell why rewards fell."""
    await fall_and_hold(engine, judge)
    async with engine.begin() as connection:
        await mark_unloaded(connection, "m", [0], "its files are gone", "controller", is_lost=True)
        await connection.execute(text("UPDATE policies SET share = NULL WHERE version = 0"))
    await judge.look(engine)
    async with engine.connect() as connection:
        assert await why_held(connection, "m") is None


async def test_training_resumed_by_a_person_is_not_held_again_for_the_same_drop(
    engine: AsyncEngine, judge: Gate
) -> None:
    await fall_and_hold(engine, judge)
    async with engine.begin() as connection:
        await freeze(connection, "m", frozen=False, reason="it is known", actor="operator")
        assert await why_held(connection, "m") is None
    await judge.look(engine)
    async with engine.connect() as connection:
        assert await why_held(connection, "m") is None
    assert await shares(engine) == {0: RULE["control_share"]}


@pytest.mark.parametrize(("undecided", "ends"), [("promote", "serving"), ("keep", "rolled_back")])
async def test_reward_loss_in_a_task_family_is_reported_and_rolled_back_if_the_recipe_asks(
    engine: AsyncEngine, judge: Gate, undecided: str, ends: str
) -> None:
    await serves(engine, 1, 0, {**IMMEDIATE, "undecided": undecided})
    for family, old, new in (("sum", FAIR, GOOD), ("sql", GOOD, BAD)):
        arms: Any = {("control", 0): old, ("serving", 1): new}
        many = 600 if family == "sum" else 120
        await live(engine, arms, family, many=many, task=f"{family}/1")
    for _ in range(2):
        await judge.look(engine)
    assert (await states(engine))[1] == ends
    reasons = [line.reason for line in await read_event_lines(engine, "m") if line.version == "m@1"]
    assert len([one for one in reasons if "loses more on the tasks 'sql'" in one]) == 1


@pytest.mark.parametrize(("verdict", "serving"), [("undecided", 0), (None, 1)])
async def test_canary_promoted_without_proof_can_lose_the_traffic_again(
    engine: AsyncEngine, judge: Gate, verdict: str | None, serving: int
) -> None:
    """As much is known in the end as a trial needs, and it tells against it; not so if a person
    promoted it. What was trained on it is not thrown away.
    """
    evidence = verdict and {"verdict": verdict}
    await next_version(engine, 1, 0, {**RULE, "margin": 0.05})
    async with engine.begin() as connection:
        why: Any = {"reason": "it", "actor": "controller", "evidence": evidence}
        await promote(connection, "m", 1, control_share=0.5, **why)
    await pass_time(engine)
    await next_version(engine, 2, 1)
    arms: Any = {("control", 0): [0.0, 1.0, 0.55], ("serving", 1): [0.0, 1.0, 0.45]}
    await live(engine, arms, many=300)
    await judge.look(engine)
    assert (await states(engine))[1] == "serving"
    await live(engine, arms, "b", many=150)
    await look(engine)
    assert await states(engine) == {serving: "serving", 1 - serving: "retired", 2: "written"}
    assert await shares(engine) == ({} if serving == 0 else {0: 0.5})


async def test_version_after_a_roll_back_is_watched_again(engine: AsyncEngine, judge: Gate) -> None:
    for number in (1, 2):
        await serves(engine, number, 0)
        assert await shares(engine) == {0: 0.3}
        arms: Any = {("control", 0): GOOD, ("serving", number): BAD}
        await live(engine, arms, str(number))
        await judge.look(engine)
    assert await states(engine) == {0: "serving", 1: "rolled_back", 2: "rolled_back"}


@pytest.mark.parametrize("share", [0.0, 0.3])
async def test_version_without_its_control_is_not_judged_and_shown_as_unwatched(
    engine: AsyncEngine, judge: Gate, share: float
) -> None:
    await serves(engine, 1, 0, {**IMMEDIATE, "control_share": share})
    async with engine.begin() as connection:
        await connection.execute(text("UPDATE policies SET share = NULL"))
    await live(engine, {("serving", 1): BAD})
    await judge.look(engine)
    assert await states(engine) == {0: "retired", 1: "serving"}
    assert is_watched() == (not share)


async def test_operators_promotion_is_judged_by_its_own_episodes_only(
    engine: AsyncEngine, judge: Gate
) -> None:
    """It may be a repair, and what it repairs has episodes that count only later."""
    await serves(engine, 1, 0)
    await next_version(engine, 2, 1, IMMEDIATE)
    async with engine.begin() as connection:
        await promote(connection, "m", 2, actor="operator")
    arms: Any = {("control", 0): GOOD, ("serving", 1): BAD, ("serving", 2): GOOD}
    await live(engine, arms)
    await judge.look(engine)
    assert (await states(engine))[2] == "serving"
    await pass_time(engine)
    await live(engine, {("control", 0): GOOD, ("serving", 2): BAD}, "b")
    await judge.look(engine)
    assert await states(engine) == {0: "serving", 1: "rolled_back", 2: "rolled_back"}


async def test_control_serving_after_a_roll_back_is_not_shown_as_unwatched(
    engine: AsyncEngine, judge: Gate
) -> None:
    await moved(engine, judge)
    [control] = await shares(engine)
    await live(engine, {("control", control): GOOD, ("serving", 4): BAD}, "b", many=300)
    for _ in range(2):
        await look(engine)
    assert (await states(engine))[control] == "serving"
    assert await shares(engine) == {}
    assert is_watched()


async def test_canary_is_rolled_back_with_its_parent(engine: AsyncEngine, judge: Gate) -> None:
    await serves(engine, 1, 0)
    await next_version(engine, 2, 1, RULE)
    await judge.look(engine)
    assert (await states(engine))[2] == "canary"
    await live(engine, {("control", 0): GOOD, ("serving", 1): BAD, ("canary", 2): BAD})
    await look(engine)
    assert await states(engine) == {0: "serving", 1: "rolled_back", 2: "rolled_back"}


async def test_promoted_control_leaves_the_policy_without_a_control(
    engine: AsyncEngine, judge: Gate
) -> None:
    await serves(engine, 1, 0)
    async with engine.begin() as connection:
        await promote(connection, "m", 0)
    await live(engine, {("control", 0): GOOD, ("serving", 1): BAD})
    await judge.look(engine)
    assert await states(engine) == {0: "serving", 1: "retired"}
    assert await shares(engine) == {}
