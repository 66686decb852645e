"""A canary is compared with the serving version by their episodes, and decided about once."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from prometheus_client import generate_latest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine
from structlog.testing import capture_logs

from controller.gate import Gate
from controller.metrics import GATE_EPISODES
from pawl.commands.policies import read_event_lines
from store.records import Arm, SpoolRecord
from store.version_states import freeze
from store.versions import policy_name
from store.write.ingest import Ingester
from tests.integration.conftest import Pawl
from tests.support.controller.trials import (
    BAD,
    FROM_S,
    GOOD,
    LESS,
    MANY,
    MORE,
    RULE,
    begin_trial,
    changes,
    controller,
    live,
    loaded,
    look,
    next_version,
    on_trial,
    pass_time,
    shares,
    states,
)
from tests.support.ledger.lineage import promote
from tests.support.records import ago, call, reward

AT_ONCE = {**RULE, "decide_within_h": 0.5}


async def last_event(engine: AsyncEngine) -> Any:
    return (await read_event_lines(engine, "m"))[-1]


@pytest.mark.parametrize(
    ("episodes", "share"),
    [
        pytest.param(0, 0.5, id="half-of-little"),
        # In 12 hours without the last 10 minutes: 2367 episodes, of which 200·n/(n + m) suffice.
        pytest.param(200 * 24, 0.093, id="as-much-as-decides-in-time"),
    ],
)
async def test_share_of_a_canary_follows_the_traffic(
    engine: AsyncEngine, judge: Gate, episodes: int, share: float
) -> None:
    await loaded(engine, 0)
    began = [ago(60.0 + number, 1) for number in range(episodes)]
    records = [call(f"e-{number}", **one) for number, one in enumerate(began)]
    await Ingester().store(engine, records)
    await judge.look(engine)
    assert await states(engine) == {0: "serving", 1: "canary"}
    assert await shares(engine) == {1: pytest.approx(share, abs=0.001)}
    # Nothing is decided before there are episodes.
    await judge.look(engine)
    assert await changes(engine) == [("m@1", "canary")]


async def test_better_version_is_promoted_and_previous_version_becomes_control(
    engine: AsyncEngine, judge: Gate
) -> None:
    await on_trial(engine, judge)
    with capture_logs() as logs:
        await judge.look(engine)
    [moved] = [one for one in logs if one["event"] == "gate_moved"]
    assert (moved["version"], moved["to"]) == ("m@1", "serving")
    assert await states(engine) == {0: "retired", 1: "serving"}
    assert await shares(engine) == {0: RULE["control_share"]}
    last = await last_event(engine)
    assert (last.version, last.to_state, last.actor) == ("m@1", "serving", "controller")
    assert last.evidence["verdict"] == "better"
    figures = last.evidence["figures"]
    assert figures["lower"] > -RULE["margin"]
    assert figures["better"] >= figures["better_needed"]
    assert figures["new"]["mean"] == pytest.approx(0.95)
    # Nothing more is done at later looks.
    await judge.look(engine)
    await look(engine)
    assert await changes(engine) == [("m@1", "canary"), ("m@0", "retired"), ("m@1", "serving")]


async def test_worse_version_is_rolled_back_and_its_descendants_are_rejected(
    engine: AsyncEngine, judge: Gate
) -> None:
    await begin_trial(engine, judge)
    await next_version(engine, 2, 1, RULE)
    await next_version(engine, 3, 0)
    await live(engine, {("serving", 0): GOOD, ("canary", 1): BAD})
    await judge.look(engine)
    assert await states(engine) == {0: "serving", 1: "rolled_back", 2: "rejected", 3: "written"}
    [lost] = [
        line for line in await read_event_lines(engine, "m") if line.to_state == "rolled_back"
    ]
    assert lost.reason == "scores lower than the old version"
    assert isinstance(lost.evidence, dict)
    assert lost.evidence["verdict"] == "worse"


@pytest.mark.parametrize(
    ("more", "mine", "others", "becomes", "kept"),
    [
        pytest.param({}, MORE, LESS, "serving", {0: 0.5}, id="promoted"),
        # By half the margin at least.
        pytest.param({}, LESS, MORE, "retired", {}, id="retired-if-lower"),
        pytest.param({"undecided": "keep"}, MORE, LESS, "retired", {}, id="keep"),
        # Who wants no control is not given one.
        pytest.param({"control_share": 0.0}, MORE, LESS, "serving", {}, id="no-control"),
    ],
)
async def test_reward_difference_so_far_decides_a_trial_at_its_deadline(
    engine: AsyncEngine,
    judge: Gate,
    more: Mapping[str, Any],
    mine: Sequence[float],
    others: Sequence[float],
    becomes: str,
    kept: Mapping[int, float],
) -> None:
    """And what is not proven is compared with as many episodes as before."""
    await on_trial(engine, judge, {**AT_ONCE, "margin": 0.01, **more}, mine=mine, others=others)
    await next_version(engine, 2, 1)
    await judge.look(engine)
    before = "retired" if becomes == "serving" else "serving"
    # What was trained on from it goes on.
    assert await states(engine) == {0: before, 1: becomes, 2: "written"}
    assert await shares(engine) == kept
    last = await last_event(engine)
    assert last.reason.startswith("nothing was shown in time: the difference so far is ")
    assert last.evidence["verdict"] == "undecided"


async def test_trial_deadline_restarts_when_the_serving_version_changes(
    engine: AsyncEngine, judge: Gate
) -> None:
    await begin_trial(engine, judge, {**AT_ONCE, "margin": 0.01})
    async with engine.begin() as connection:
        later = "UPDATE policies SET changed_at = now() - interval '25 min' WHERE version = 0"
        await connection.execute(text(later))
    await live(engine, {("serving", 0): MORE, ("canary", 1): LESS}, from_s=1400.0)
    await judge.look(engine)
    assert (await states(engine))[1] == "canary"


async def test_trial_without_rewards_outlasts_its_deadline_until_a_newer_version(
    engine: AsyncEngine, judge: Gate
) -> None:
    await begin_trial(engine, judge, AT_ONCE)
    await live(engine, {("serving", 0): GOOD, ("canary", 1): GOOD}, are_late=True)
    await judge.look(engine)
    assert await states(engine) == {0: "serving", 1: "canary"}
    await next_version(engine, 2, 1, RULE)
    await judge.look(engine)
    assert await states(engine) == {0: "serving", 1: "retired", 2: "loaded"}
    await judge.look(engine)
    assert (await states(engine))[2] == "canary"


async def test_control_share_falls_to_the_recipes_value_once_the_new_version_is_proven(
    engine: AsyncEngine, judge: Gate
) -> None:
    rule = {**AT_ONCE, "margin": 0.01}
    await on_trial(engine, judge, rule, mine=MORE, others=LESS)
    await judge.look(engine)
    assert await shares(engine) == {0: 0.5}
    await pass_time(engine)
    await live(engine, {("control", 0): BAD, ("serving", 1): GOOD}, "b", many=420)
    for _ in range(3):
        await judge.look(engine)
    assert await shares(engine) == {0: RULE["control_share"]}
    # It is said once.
    assert (await changes(engine))[-2:] == [("m@1", "serving"), ("m@0", "retired")]


@pytest.mark.parametrize("more", [{}, {"decide_within_h": 0.5, "margin": 0.01}])
async def test_decided_canary_waits_for_approval_with_a_single_event(
    pawl: Pawl, engine: AsyncEngine, judge: Gate, more: Mapping[str, Any]
) -> None:
    good = not more
    rule = {**RULE, **more, "approve": True}
    mine, others = (GOOD, BAD) if good else (MORE, LESS)
    await on_trial(engine, judge, rule, mine=mine, others=others)
    for one in (judge, judge, controller(engine)):
        await one.look(engine)
    assert await states(engine) == {0: "serving", 1: "canary"}
    assert await changes(engine) == [("m@1", "canary"), ("m@1", "canary")]
    last = await last_event(engine)
    assert last.reason.startswith("it waits for approval (`pawl policies promote`): ")
    assert last.evidence["verdict"] == ("better" if good else "undecided")
    assert (await pawl("policies", "promote", "m@1")).exit_code == 0
    await judge.look(engine)
    assert await states(engine) == {0: "retired", 1: "serving"}


async def test_immediate_version_waits_for_approval_with_a_single_event(
    engine: AsyncEngine, judge: Gate
) -> None:
    await loaded(engine, 0, rule={**RULE, "mode": "immediate", "approve": True})
    for one in (judge, judge, controller(engine)):
        await one.look(engine)
    assert await changes(engine) == [("m@1", "loaded")]
    assert "`pawl policies promote`" in (await last_event(engine)).reason


async def test_worse_version_is_rolled_back_without_approval(
    engine: AsyncEngine, judge: Gate
) -> None:
    await on_trial(engine, judge, {**RULE, "approve": True}, mine=BAD, others=GOOD)
    await judge.look(engine)
    assert await states(engine) == {0: "serving", 1: "rolled_back"}


async def test_traffic_of_a_frozen_policy_is_not_moved(engine: AsyncEngine, judge: Gate) -> None:
    await on_trial(engine, judge)
    for frozen in (True, False):
        async with engine.begin() as connection:
            await freeze(connection, "m", frozen=frozen, reason="release", actor="operator")
        await judge.look(engine)
        assert f'gate_frozen{{policy="m"}} {float(frozen)}' in generate_latest().decode()
        assert (await states(engine))[1] == ("canary" if frozen else "serving")


async def test_next_version_is_tried_after_the_previous_trial(
    engine: AsyncEngine, judge: Gate
) -> None:
    await on_trial(engine, judge)
    await next_version(engine, 2, 1, RULE)
    await judge.look(engine)
    assert await states(engine) == {0: "retired", 1: "serving", 2: "loaded"}
    await judge.look(engine)
    assert await states(engine) == {0: "retired", 1: "serving", 2: "canary"}
    # Half of what the control leaves.
    assert await shares(engine) == {0: 0.3, 2: pytest.approx(0.35)}


async def test_canary_older_than_the_serving_version_is_retired(
    engine: AsyncEngine, judge: Gate
) -> None:
    await begin_trial(engine, judge)
    await next_version(engine, 2, 0, RULE)
    async with engine.begin() as connection:
        await promote(connection, "m", 2)
    await judge.look(engine)
    assert await states(engine) == {0: "retired", 1: "retired", 2: "serving"}


async def test_version_that_hangs_in_some_of_its_episodes_is_rolled_back(
    engine: AsyncEngine, judge: Gate
) -> None:
    """Nothing is said of an episode that hangs; all others are as good as those of what serves."""
    await begin_trial(engine, judge)
    ended = {"http_status": None, "status": "upstream_error"}
    ended["total_ms"] = (RULE["reward_delay_s"] + 1) * 1000
    records: list[SpoolRecord] = []
    for number in range(3 * MANY):
        for version in (0, 1):
            arm: Arm = "canary" if version else "serving"
            hangs = bool(version) and number % 2 == 0
            key = f"{arm}-{number}"
            made = call(
                key,
                policy_version=version,
                arm=arm,
                served_model=policy_name("m", version, "m"),
                **ago(FROM_S - 9 * number, version),
                **(ended if hangs else {}),
            )
            records += [made] if hangs else [made, reward(0.5, episode=key)]
    await Ingester().store(engine, records)
    await judge.look(engine)
    assert await states(engine) == {0: "serving", 1: "rolled_back"}
    last = await last_event(engine)
    assert last.reason.startswith("more failed requests than the old version: 5")
    # All are counted, in both arms alike.
    figures = last.evidence["figures"]
    assert figures["new"]["episodes"] == figures["old"]["episodes"]


def shown(compared: str, version: str) -> str:
    labels = f'compared="{compared}",policy="m",version="{version}"'
    return f"pawl_controller_gate_episodes{{{labels}}} "


async def test_metrics_show_a_comparisons_figures_while_it_runs(
    engine: AsyncEngine, judge: Gate
) -> None:
    GATE_EPISODES.clear()
    await on_trial(engine, judge, mine=MORE, others=MORE)
    await judge.look(engine)
    page = generate_latest().decode()
    assert shown("trial", "new") + f"{MANY}.0" in page
    assert 'pawl_controller_gate_bound{bound="lower",compared="trial",policy="m"} -' in page
    assert shown("watch", "new") not in page
    await live(engine, {("serving", 0): BAD, ("canary", 1): GOOD}, "b", from_s=705, to_s=650)
    await judge.look(engine)
    assert (await states(engine))[1] == "serving"
    await judge.look(engine)
    page = generate_latest().decode()
    assert shown("trial", "new") not in page
    assert shown("watch", "new") + "0.0" in page
    assert 'pawl_controller_gate_moves_total{policy="m",to="serving"}' in page
