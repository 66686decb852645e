"""The gate: what episodes came to decides which version has the traffic, once, with its reason."""

import asyncio
import json
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine
from structlog.testing import capture_logs
from typer.testing import CliRunner

import pawl.steward.policy_gate
from pawl.cli import app
from pawl.policies.events import events_of, events_table
from pawl.policies.moving import split_name
from pawl.policies.show import table, versions_of
from pawl.settings import StewardSettings
from pawl.steward.gating import Gating
from store.errors import NotGated, UnknownPolicy
from store.records import Arm, SpoolRecord
from store.updates import gating as moves
from store.updates.gating import make_candidate
from store.updates.policies import list_versions
from store.updates.states import lock_policies
from store.versions import policy_name
from store.write.ingest import Ingester
from tests.support.faults.killing import Killed, killing
from tests.support.ledger.lineage import trained
from tests.support.records import ago, call, reward
from tests.support.waiting import eventually
from trainer.metrics import VERSION
from trainer.publishing.replicas import Replicas
from trainer.recipes.gate import GateOptions

RULE = GateOptions(
    mode="gated",
    canary_share=0.4,
    base_share=0.4,
    margin=0.2,
    reward_delay_s=600.0,
    fewest=10,
)
# How long ago what a test does was done, and the seconds in which its episodes began.
HOUR_S = 3600.0
FROM_S, TO_S = 3000.0, 700.0
# Episodes of each arm: enough for a clear difference.
MANY = 60


def gate(database_url: str) -> Gating:
    settings = StewardSettings.model_validate({"database_url": database_url})
    return Gating(settings, 0.01, Replicas(settings.server_urls))


async def candidate(engine: AsyncEngine, *parents: int, rule: GateOptions = RULE) -> None:
    """Versions with these parents, of which the last waits for its trial."""
    async with engine.begin() as connection:
        await trained(connection, *parents)
        dumped = rule.model_dump(mode="json")
        await make_candidate(connection, "m", len(parents), dumped, reason="probed")


async def pass_time(engine: AsyncEngine) -> None:
    """Let all changes of states have been made an hour ago."""
    async with engine.begin() as connection:
        # As whoever moves traffic does first.
        await lock_policies(connection, ["m"])
        changed = text("UPDATE policies SET changed_at = changed_at - make_interval(secs => :s)")
        await connection.execute(changed, {"s": HOUR_S})


async def live(
    engine: AsyncEngine,
    rewards: dict[tuple[Arm, int], Sequence[float]],
    run: str = "a",
    from_s: float = FROM_S,
    many: int = MANY,
    *,
    to_s: float = TO_S,
    are_late: bool = False,
) -> Sequence[SpoolRecord]:
    """Episodes of arms and their versions, in turn, with these rewards over and over.

    If `are_late`, the rewards are given, and not stored: they are returned.
    """
    records: list[SpoolRecord] = []
    late: list[SpoolRecord] = []
    step = (from_s - to_s) / many
    for number in range(many):
        for place, ((arm, version), values) in enumerate(rewards.items()):
            key = f"{run}-{arm}-{number}"
            served = policy_name("m", version, "m")
            began = ago(from_s - step * number, place)
            made = call(key, policy_version=version, arm=arm, served_model=served, **began)
            records.append(made)
            late.append(reward(values[number % len(values)], episode=key))
    await Ingester().store(engine, records if are_late else records + late)
    return late


async def states(engine: AsyncEngine) -> dict[int, str]:
    async with engine.connect() as connection:
        return {one.version: one.state for one in await list_versions(connection, "m")}


async def changes(engine: AsyncEngine) -> list[tuple[str, str, str]]:
    """What the steward and operators did, oldest first."""
    return [
        (line.version, line.to_state, line.actor)
        for line in await events_of(engine, "m")
        if line.actor in ("steward", "operator")
    ]


async def on_trial(engine: AsyncEngine, judge: Gating, better: bool = True) -> None:
    """A canary of version 1, while the base model serves, with its episodes."""
    await candidate(engine, 0)
    await judge.look(engine)
    await pass_time(engine)
    mine, others = ([1.0, 0.9], [0.0, 0.1]) if better else ([0.0, 0.1], [1.0, 0.9])
    await live(engine, {("serving", 0): others, ("canary", 1): mine})


async def test_a_better_version_is_tried_and_promoted_with_its_evidence(
    database_url: str, engine: AsyncEngine
) -> None:
    judge = gate(database_url)
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
    await live(engine, {("serving", 0): [0.0, 0.1], ("canary", 1): [1.0, 0.9]})
    await judge.look(engine)
    assert await states(engine) == {0: "published", 1: "serving"}
    last = (await events_of(engine, "m"))[-1]
    assert (last.version, last.to_state, last.actor) == ("m@1", "serving", "steward")
    assert isinstance(last.evidence, dict)
    decision = last.evidence["decision"]
    assert (decision["kind"], decision["reason"]) == ("promote", last.reason)
    assert decision["lower"] > -RULE.margin
    shown = 'pawl_steward_gate_episodes{arm="canary",policy="m"}'
    assert shown in generate_latest().decode()
    # Nothing more is done at a later look, and of a trial that is over nothing is shown.
    await judge.look(engine)
    assert shown not in generate_latest().decode()
    assert await changes(engine) == [
        ("m@1", "canary", "steward"),
        ("m@0", "published", "steward"),
        ("m@1", "serving", "steward"),
    ]


@pytest.mark.usefixtures("_settings")
async def test_what_a_steward_promotes_is_shown_and_logged_as_what_a_trainer_does(
    database_url: str, engine: AsyncEngine
) -> None:
    judge = gate(database_url)
    await on_trial(engine, judge)
    shown = 'pawl_trained_version{policy="m"}'
    with capture_logs() as logs:
        await judge.look(engine)
    assert {"event": "version_promoted", "version": "m@1", "log_level": "info"} in logs
    await judge.look(engine)
    assert f"{shown} 1.0" in generate_latest().decode()
    # It stays so after a roll-back, and a steward that is started again shows the same.
    assert (await command("rollback", "m")).exit_code == 0
    VERSION.clear()
    async with engine.begin() as connection:
        await trained_on(connection, 2, 0)
        await make_candidate(
            connection, "m", 2, RULE.model_dump(mode="json"), reason="for the test"
        )
    await gate(database_url).look(engine)
    assert f"{shown} 1.0" in generate_latest().decode()


async def test_a_worse_version_is_rolled_back_and_what_was_made_of_it_rejected(
    database_url: str, engine: AsyncEngine
) -> None:
    judge = gate(database_url)
    await candidate(engine, 0, 1)
    await judge.look(engine)
    assert await states(engine) == {0: "serving", 1: "rejected", 2: "canary"}
    await pass_time(engine)
    await live(engine, {("serving", 0): [1.0, 0.9], ("canary", 2): [0.0, 0.1]})
    await judge.look(engine)
    assert await states(engine) == {0: "serving", 1: "rejected", 2: "rolled_back"}
    [last] = (await events_of(engine, "m"))[-1:]
    assert isinstance(last.evidence, dict)
    assert last.evidence["decision"]["kind"] == "retire"


async def test_a_version_that_turns_bad_while_it_serves_is_rolled_back(
    database_url: str, engine: AsyncEngine
) -> None:
    """No trainer runs in any of these tests, and no model server."""
    judge = gate(database_url)
    await on_trial(engine, judge)
    await judge.look(engine)
    assert await states(engine) == {0: "published", 1: "serving"}
    await pass_time(engine)
    as_good: dict[tuple[Arm, int], Sequence[float]]
    as_good = {("base", 0): [0.1, 0.0], ("serving", 1): [0.9, 1.0]}
    await live(engine, as_good, "b")
    await judge.look(engine)
    assert await states(engine) == {0: "published", 1: "serving"}
    # What the base gets right by now it gets wrong. A steward that was started again knows what it
    # was promoted for.
    bad: dict[tuple[Arm, int], Sequence[float]]
    bad = {("base", 0): [0.9, 1.0], ("serving", 1): [0.1, 0.0]}
    await live(engine, bad, "c", from_s=TO_S + 10.0, many=100)
    await gate(database_url).look(engine)
    assert await states(engine) == {0: "serving", 1: "rolled_back"}
    assert (await changes(engine))[-2:] == [
        ("m@1", "rolled_back", "steward"),
        ("m@0", "serving", "steward"),
    ]


async def test_when_the_world_gets_worse_for_all_nothing_is_rolled_back(
    database_url: str, engine: AsyncEngine
) -> None:
    judge = gate(database_url)
    await candidate(engine, 0)
    await judge.look(engine)
    await pass_time(engine)
    await live(engine, {("serving", 0): [0.6, 0.5], ("canary", 1): [0.9, 1.0]})
    await judge.look(engine)
    assert (await states(engine))[1] == "serving"
    await pass_time(engine)
    await live(engine, {("base", 0): [0.1, 0.0], ("serving", 1): [0.4, 0.5]}, "b")
    await judge.look(engine)
    assert (await states(engine))[1] == "serving"


async def test_past_its_deadline_a_version_is_rolled_back(
    database_url: str, engine: AsyncEngine
) -> None:
    judge = gate(database_url)
    await candidate(engine, 0, rule=RULE.model_copy(update={"deadline_s": HOUR_S}))
    await judge.look(engine)
    await pass_time(engine)
    await judge.look(engine)
    assert await states(engine) == {0: "serving", 1: "rolled_back"}
    assert "deadline" in (await events_of(engine, "m"))[-1].reason


async def test_the_next_candidate_is_tried_after_the_one_before_it(
    database_url: str, engine: AsyncEngine
) -> None:
    judge = gate(database_url)
    await on_trial(engine, judge)
    async with engine.begin() as connection:
        await trained_on(connection, 2, 1)
        dumped = RULE.model_dump(mode="json")
        await make_candidate(connection, "m", 2, dumped, reason="probed")
    await judge.look(engine)
    assert await states(engine) == {0: "published", 1: "serving", 2: "candidate"}
    await judge.look(engine)
    assert await states(engine) == {0: "published", 1: "serving", 2: "canary"}


async def trained_on(connection: Any, number: int, parent: int) -> None:
    """One more version of the policy."""
    from store.updates.claims import begin_update, consume

    update = await begin_update(connection, "m", parent, {})
    await consume(
        connection, update, (), {}, policy="m", version=number, adapter_path=f"/m/{number}"
    )


async def test_a_version_that_hangs_in_some_of_its_episodes_is_rolled_back(
    database_url: str, engine: AsyncEngine
) -> None:
    """Nothing is said of an episode that hangs; all others are as good as those of what serves."""
    await candidate(engine, 0)
    await gate(database_url).look(engine)
    await pass_time(engine)
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
    await gate(database_url).look(engine)
    assert await states(engine) == {0: "serving", 1: "rolled_back"}
    evidence: Any = (await events_of(engine, "m"))[-1].evidence
    counted = evidence["decision"]["arms"]
    # All are counted, in both arms alike.
    assert counted["canary"]["episodes"] == counted["serving"]["episodes"]
    assert counted["canary"]["failed"] == counted["canary"]["episodes"] // 2


async def test_what_was_stored_late_counts_before_long(
    database_url: str, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rewards that were given in time waited for the database, with a proxy."""
    judge = gate(database_url)
    await candidate(engine, 0)
    await judge.look(engine)
    await pass_time(engine)
    better: dict[tuple[Arm, int], Sequence[float]]
    better = {("serving", 0): [0.0, 0.1], ("canary", 1): [1.0, 0.9]}
    rewards = await live(engine, better, are_late=True)
    await judge.look(engine)
    await Ingester().store(engine, rewards)
    await judge.look(engine)
    assert (await states(engine))[1] == "canary"
    monkeypatch.setattr("pawl.steward.policy_gate.READ_AGAIN", timedelta(0))
    await judge.look(engine)
    assert (await states(engine))[1] == "serving"


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
    "before": killing(pawl.steward.policy_gate, "promote", after=False),
    "in the middle": killing(moves, "change_state", after=True),
    "before the commit": killing(pawl.steward.policy_gate, "promote", after=True),
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


async def test_what_is_older_than_the_version_that_serves_is_tried_no_more(
    database_url: str, engine: AsyncEngine
) -> None:
    judge = gate(database_url)
    await candidate(engine, 0)
    await judge.look(engine)
    async with engine.begin() as connection:
        await trained_on(connection, 2, 0)
        await moves.promote(connection, "m", 2, reason="imported", actor="trainer")
    await judge.look(engine)
    assert await states(engine) == {0: "published", 1: "published", 2: "serving"}


async def command(*words: str) -> Any:
    return await asyncio.to_thread(CliRunner().invoke, app, ["policies", *words])


@pytest.fixture
def _settings(database_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATABASE_URL", database_url)


@pytest.mark.usefixtures("_settings")
async def test_what_is_frozen_is_moved_by_commands_alone(
    database_url: str, engine: AsyncEngine
) -> None:
    judge = gate(database_url)
    await on_trial(engine, judge)
    assert (await command("freeze", "m", "--reason", "release day")).stdout == "m is frozen\n"
    await judge.look(engine)
    assert await states(engine) == {0: "serving", 1: "canary"}
    assert (await command("freeze", "m", "--off")).exit_code == 0
    await judge.look(engine)
    assert await states(engine) == {0: "published", 1: "serving"}
    said = [(line.reason, line.actor) for line in await events_of(engine, "m")]
    assert ("frozen: release day", "operator") in said


@pytest.mark.usefixtures("_settings")
async def test_an_operator_promotes_what_is_tried_and_rolls_it_back(
    database_url: str, engine: AsyncEngine
) -> None:
    judge = gate(database_url)
    await on_trial(engine, judge)
    assert (await command("promote", "m", "--reason", "seen by eye")).stdout == "m@1 serves\n"
    last = (await events_of(engine, "m"))[-1]
    assert (last.reason, last.actor) == ("seen by eye", "operator")
    # What it came to so far is what a watch over it starts from.
    assert isinstance(last.evidence, dict)
    assert "reference" in last.evidence
    done = await command("rollback", "m@1", "--reason", "it swears")
    assert done.stdout == "m@1 is rolled back\nm serves\n"
    assert await states(engine) == {0: "serving", 1: "rolled_back"}
    for words, error, said in (
        (("promote", "m@1"), NotGated, "'rolled_back'"),
        (("promote", "m@0"), NotGated, "serves already"),
        (("promote", "m"), UnknownPolicy, "as m@N"),
        (("promote", "m@7"), UnknownPolicy, "no version 7"),
        (("rollback", "m"), NotGated, "'serving'"),
        (("freeze", "n"), UnknownPolicy, "known: m"),
    ):
        found = await command(*words)
        assert isinstance(found.exception, error)
        assert said in str(found.exception)


@pytest.mark.usefixtures("_settings")
async def test_what_a_trial_has_come_to_is_shown(database_url: str, engine: AsyncEngine) -> None:
    await on_trial(engine, gate(database_url))
    [_, line] = await versions_of(engine, "m")
    assert line.trial is not line.explore
    shown = [json.loads(one) for one in (await command("show", "m", "--json")).stdout.splitlines()]
    assert shown[1]["trial"]["kind"] == "promote"
    assert shown[1]["trial"]["arms"]["canary"]["mean"] == pytest.approx(0.95)
    assert table(await versions_of(engine, "m")).caption is not None
    events = await command("show", "m", "--events", "--json")
    first = json.loads(events.stdout.splitlines()[0])
    assert list(first) == ["at", "version", "from_state", "to_state", "reason", "actor"]
    assert events_table(await events_of(engine, "m")).row_count == len(events.stdout.splitlines())


@pytest.mark.parametrize(
    ("named", "found"),
    [("m", ("m", None)), ("m@3", ("m", 3)), ("a@b", ("a@b", None)), ("a@b@0", ("a@b", 0))],
)
def test_a_version_is_named_by_its_policy_and_number(
    named: str, found: tuple[str, int | None]
) -> None:
    assert split_name(named) == found
