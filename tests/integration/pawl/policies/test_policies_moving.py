"""`pawl policies promote`, `rollback`, `freeze`: what operators do beside a gate, and are shown."""

import json

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.commands.policies import events_of, events_table, versions_of, versions_table
from pawl.commands.policy_traffic import split_name
from store.errors import NotGated, UnknownPolicy
from tests.support.steward.trials import _settings, command, gate, on_trial, states

__all__ = ["_settings"]


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
    assert versions_table(await versions_of(engine, "m")).caption is not None
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
