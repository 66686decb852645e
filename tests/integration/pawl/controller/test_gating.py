"""The gate: what episodes came to decides which version has the traffic, once, with its reason."""

from datetime import timedelta
from typing import Any

import pytest
from prometheus_client import generate_latest
from sqlalchemy.ext.asyncio import AsyncEngine
from structlog.testing import capture_logs

from pawl.commands.policies import events_of, versions_of, versions_table
from pawl.controller.gate.records import Decision
from pawl.controller.gating import Gating
from store.records import Arm, SpoolRecord
from store.version_queries import list_versions
from store.versions import policy_name
from store.write.ingest import Ingester
from tests.integration.pawl.conftest import Pawl
from tests.support.controller.trials import (
    BAD,
    FROM_S,
    GOOD,
    HOUR_S,
    MANY,
    RULE,
    TO_S,
    begin_trial,
    candidate,
    changes,
    gate,
    live,
    look,
    next_candidate,
    next_version,
    on_trial,
    pass_time,
    states,
)
from tests.support.ledger.lineage import promote
from tests.support.records import ago, call, reward
from trainer.metrics import VERSION


async def test_better_version_is_tried_and_promoted_with_its_evidence(
    engine: AsyncEngine, judge: Gating
) -> None:
    await candidate(engine, 0)
    await judge.look(engine)
    assert await states(engine) == {0: "serving", 1: "canary"}
    async with engine.connect() as connection:
        shares = {one.version: one.share for one in await list_versions(connection, "m")}
    assert shares == {0: 0.4, 1: 0.4}
    # Nothing is decided before there are episodes.
    await judge.look(engine)
    assert await states(engine) == {0: "serving", 1: "canary"}
    await pass_time(engine)
    await live(engine, {("serving", 0): BAD, ("canary", 1): GOOD})
    await judge.look(engine)
    assert await states(engine) == {0: "published", 1: "serving"}
    last = (await events_of(engine, "m"))[-1]
    assert (last.version, last.to_state, last.actor) == ("m@1", "serving", "controller")
    assert isinstance(last.evidence, dict)
    decision = last.evidence["decision"]
    assert (decision["kind"], decision["reason"]) == ("promote", last.reason)
    assert decision["lower"] > -RULE.margin
    shown = 'pawl_controller_gate_episodes{arm="canary",policy="m"}'
    assert shown in generate_latest().decode()
    # Nothing more is done at a later look, and of a trial that is over nothing is shown.
    await judge.look(engine)
    assert shown not in generate_latest().decode()
    assert await changes(engine) == [
        ("m@1", "canary", "controller"),
        ("m@0", "published", "controller"),
        ("m@1", "serving", "controller"),
    ]


async def test_promotion_by_a_controller_is_shown_and_logged_as_one_by_a_trainer(
    pawl: Pawl, engine: AsyncEngine, judge: Gating
) -> None:
    await on_trial(engine, judge)
    shown = 'pawl_trained_version{policy="m"}'
    with capture_logs() as logs:
        await judge.look(engine)
    assert {"event": "version_promoted", "version": "m@1", "log_level": "info"} in logs
    await judge.look(engine)
    assert f"{shown} 1.0" in generate_latest().decode()
    # It stays so after a roll-back, and a controller that is started again shows the same.
    assert (await pawl("policies", "rollback", "m")).exit_code == 0
    VERSION.clear()
    await next_candidate(engine, 2, 0)
    await gate(engine).look(engine)
    assert f"{shown} 1.0" in generate_latest().decode()


async def test_worse_version_is_rolled_back_and_what_was_made_of_it_rejected(
    engine: AsyncEngine, judge: Gating
) -> None:
    await candidate(engine, 0, 1)
    await judge.look(engine)
    assert await states(engine) == {0: "serving", 1: "rejected", 2: "canary"}
    await pass_time(engine)
    await live(engine, {("serving", 0): GOOD, ("canary", 2): BAD})
    await judge.look(engine)
    assert await states(engine) == {0: "serving", 1: "rejected", 2: "rolled_back"}
    [last] = (await events_of(engine, "m"))[-1:]
    assert isinstance(last.evidence, dict)
    assert last.evidence["decision"]["kind"] == "retire"


async def test_version_whose_episodes_get_no_rewards_is_rolled_back(
    engine: AsyncEngine, judge: Gating
) -> None:
    await begin_trial(engine, judge)
    await live(engine, {("serving", 0): BAD})
    # A third of them have one, and these are the best.
    await live(engine, {("canary", 1): [1.0]}, "b", many=MANY // 3)
    await live(engine, {("canary", 1): [0.0]}, "c", many=2 * MANY // 3, are_late=True)
    await judge.look(engine)
    assert await states(engine) == {0: "serving", 1: "rolled_back"}
    last = (await events_of(engine, "m"))[-1]
    assert last.reason.startswith("more unscored episodes than what serves: 66.7% of the canary's")


async def test_rewards_outside_of_the_range_promote_nothing_and_are_shown(
    engine: AsyncEngine, judge: Gating
) -> None:
    await begin_trial(engine, judge)
    await live(engine, {("serving", 0): [0.0], ("canary", 1): [20.0, 1.0]})
    with capture_logs() as logs:
        await judge.look(engine)
        await judge.look(engine)
    assert await states(engine) == {0: "serving", 1: "canary"}
    [warning] = [one for one in logs if one["event"] == "rewards_clipped"]
    assert (warning["judged"], warning["shares"]) == ("trial", {"canary": "50%"})
    shown = 'pawl_controller_gate_clipped_share{arm="canary",judged="trial",policy="m"}'
    assert f"{shown} 0.5" in generate_latest().decode()
    lines = await versions_of(engine, "m")
    assert isinstance(lines[1].trial, Decision)
    assert lines[1].trial.arms["canary"].clipped == MANY // 2
    said = str(versions_table(lines).caption)
    assert f"the rewards of {MANY // 2} canary outside of gate.reward_range" in said
    assert "its rewards suffice, but 50% of the canary's rewards lie outside of" in said


async def test_world_that_gets_worse_for_all_rolls_nothing_back(
    engine: AsyncEngine, judge: Gating
) -> None:
    await begin_trial(engine, judge)
    await live(engine, {("serving", 0): [0.6, 0.5], ("canary", 1): GOOD})
    await judge.look(engine)
    await pass_time(engine)
    await live(engine, {("base", 0): BAD, ("serving", 1): [0.4, 0.5]}, "b")
    await judge.look(engine)
    assert await states(engine) == {0: "published", 1: "serving"}


async def test_version_past_its_deadline_is_rolled_back(engine: AsyncEngine, judge: Gating) -> None:
    await candidate(engine, 0, rule=RULE.model_copy(update={"deadline_s": HOUR_S}))
    await judge.look(engine)
    await pass_time(engine)
    await judge.look(engine)
    assert await states(engine) == {0: "serving", 1: "rolled_back"}
    assert "deadline" in (await events_of(engine, "m"))[-1].reason


async def test_next_candidate_is_tried_after_the_one_before_it(
    engine: AsyncEngine, judge: Gating
) -> None:
    await on_trial(engine, judge)
    await next_candidate(engine, 2, 1)
    await judge.look(engine)
    assert await states(engine) == {0: "published", 1: "serving", 2: "candidate"}
    await judge.look(engine)
    assert await states(engine) == {0: "published", 1: "serving", 2: "canary"}


async def test_version_that_hangs_in_some_of_its_episodes_is_rolled_back(
    engine: AsyncEngine, judge: Gating
) -> None:
    """Nothing is said of an episode that hangs; all others are as good as those of what serves."""
    await begin_trial(engine, judge)
    longer_ms = (RULE.reward_delay_s + 1) * 1000
    records: list[SpoolRecord] = []
    for number in range(3 * MANY):
        for place, version in enumerate((0, 1)):
            arm: Arm = "canary" if version else "serving"
            began = ago(FROM_S - 12 * number, place)
            hangs = bool(version) and number % 2 == 0
            key = f"{arm}-{number}"
            ended = {"http_status": None, "status": "upstream_error", "total_ms": longer_ms}
            made = call(
                key,
                policy_version=version,
                arm=arm,
                served_model=policy_name("m", version, "m"),
                **began,
                **(ended if hangs else {}),
            )
            records += [made] if hangs else [made, reward(0.5, episode=key)]
    await Ingester().store(engine, records)
    await judge.look(engine)
    assert await states(engine) == {0: "serving", 1: "rolled_back"}
    evidence: Any = (await events_of(engine, "m"))[-1].evidence
    counted = evidence["decision"]["arms"]
    # All are counted, in both arms alike.
    assert counted["canary"]["episodes"] == counted["serving"]["episodes"]
    assert counted["canary"]["failed"] == counted["canary"]["episodes"] // 2


async def test_late_rewards_count_in_a_trial_before_long(
    engine: AsyncEngine, judge: Gating, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rewards that were given in time waited for the database, with a proxy."""
    await begin_trial(engine, judge)
    rewards = await live(engine, {("serving", 0): BAD, ("canary", 1): GOOD}, are_late=True)
    await judge.look(engine)
    await Ingester().store(engine, rewards)
    await judge.look(engine)
    assert (await states(engine))[1] == "canary"
    monkeypatch.setattr("pawl.controller.gating.READ_AGAIN", timedelta(0))
    await judge.look(engine)
    assert (await states(engine))[1] == "serving"


async def test_version_older_than_what_serves_is_tried_no_more(
    engine: AsyncEngine, judge: Gating
) -> None:
    await candidate(engine, 0)
    await judge.look(engine)
    await next_version(engine, 2, 0)
    async with engine.begin() as connection:
        await promote(connection, "m", 2, reason="imported", actor="trainer")
    await judge.look(engine)
    assert await states(engine) == {0: "published", 1: "published", 2: "serving"}


FAIR = [0.6, 0.5]
WATCHED = 'pawl_controller_gate_watched{policy="m"} 1.0'


async def tried_twice(engine: AsyncEngine, judge: Gating) -> None:
    """Versions 1 and 2 were promoted by their trials, one after the other."""
    await begin_trial(engine, judge)
    await live(engine, {("serving", 0): BAD, ("canary", 1): FAIR}, "first", many=100)
    await judge.look(engine)
    await pass_time(engine)
    await next_candidate(engine, 2, 1)
    await judge.look(engine)
    await pass_time(engine)
    await live(
        engine, {("base", 0): BAD, ("serving", 1): FAIR, ("canary", 2): GOOD}, "second", many=100
    )
    await judge.look(engine)
    await pass_time(engine)
    assert await states(engine) == {0: "published", 1: "published", 2: "serving"}


async def turns_bad(engine: AsyncEngine, number: int) -> None:
    """What the base model gets right by now a version that serves gets wrong."""
    await live(
        engine,
        {("base", 0): GOOD, ("serving", number): BAD},
        f"bad-{number}",
        from_s=TO_S + 10.0,
        many=100,
    )


async def test_version_serving_again_after_a_roll_back_is_rolled_back_if_it_turns_bad(
    engine: AsyncEngine, judge: Gating
) -> None:
    await tried_twice(engine, judge)
    await turns_bad(engine, 2)
    await look(engine)
    assert await states(engine) == {0: "published", 1: "serving", 2: "rolled_back"}
    await pass_time(engine)
    await live(engine, {("base", 0): BAD, ("serving", 1): FAIR}, "again", many=100)
    await look(engine)
    assert (await states(engine))[1] == "serving"
    assert WATCHED in generate_latest().decode()
    assert not any(line.unwatched for line in await versions_of(engine, "m"))
    await turns_bad(engine, 1)
    await look(engine)
    assert await states(engine) == {0: "serving", 1: "rolled_back", 2: "rolled_back"}
    assert (await changes(engine))[-4:] == [
        ("m@2", "rolled_back", "controller"),
        ("m@1", "serving", "controller"),
        ("m@1", "rolled_back", "controller"),
        ("m@0", "serving", "controller"),
    ]


async def test_version_given_the_traffic_again_by_an_operator_is_watched_by_its_own_trial(
    pawl: Pawl, engine: AsyncEngine, judge: Gating
) -> None:
    await tried_twice(engine, judge)
    assert (await pawl("policies", "promote", "m@1")).exit_code == 0
    await pass_time(engine)
    await turns_bad(engine, 1)
    await look(engine)
    assert (await states(engine))[1] == "rolled_back"
