"""`pawl policies list`, `show`, `promote`, `rollback` and `freeze`."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.commands.policies import (
    events_of,
    events_table,
    policies_of,
    policies_table,
    versions_of,
    versions_table,
)
from pawl.commands.policy_traffic import split_name
from store import claims
from store.errors import NotGated, UnknownPolicy
from store.policy_table import parse_policies
from store.version_states import ensure_base
from tests.integration.pawl.conftest import Pawl
from tests.support.controller.trials import gate, on_trial, states
from tests.support.ledger.episodes import ingest
from tests.support.ledger.lineage import promote
from tests.support.records import call, reward, statement

FILE = """
[[policy]]
name = "writer"
base = "qwen"
agents = ["writer"]
models = ["prose", "writer"]
recipe = "single"
[[policy]]
name = "fresh"
base = "qwen"
[[policy]]
name = "rest"
base = "qwen"
models = ["qwen"]
trained = false
"""
EXPLORES = "share = 0.1, temperature = 0.7, drop_strict = true"


def exploring(file: str) -> str:
    """The file, whose first policy explores."""
    return file.replace('recipe = "single"', f"explore = {{ {EXPLORES} }}")


def printed(table: Table, width: int = 120) -> list[str]:
    console = Console(width=width)
    with console.capture() as shown:
        console.print(table)
    return shown.get().splitlines()


async def lines(pawl: Pawl, *words: str) -> list[dict[str, Any]]:
    done = await pawl("policies", *words, "--json")
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


async def train(engine: AsyncEngine, name: str, metrics: dict[str, Any]) -> None:
    """Make version 1 of a policy."""
    async with engine.begin() as connection:
        update = await claims.begin_update(connection, name, 0, {})
        await claims.consume(
            connection, update, (), metrics, policy=name, version=1, adapter_path="/gone"
        )


# list


@pytest.fixture
async def filled(engine: AsyncEngine) -> AsyncEngine:
    """`writer` has version 1, and two episodes of three wait; `old` is in the store alone."""
    async with engine.begin() as connection:
        await ensure_base(connection, "old")
        await ensure_base(connection, "writer", "qwen")
    await train(engine, "writer", {})
    async with engine.begin() as connection:
        await promote(connection, "writer", 1)
        scored = call("scored", policy="writer")
        paid = call("paid", policy="writer")
        records = [scored, paid, call("open", policy="writer"), reward(1.0, episode="scored")]
        await ingest(connection, [*records, statement("reward", 1.0, call=str(paid.id))])
    return engine


WRITER = {
    "name": "writer",
    "kind": "trained",
    "base": "qwen",
    "agents": ["writer"],
    "models": ["writer", "prose"],
    "recipe": "single",
    "serving": "writer@1",
    "versions": 1,
    "waiting": 2,
}
FRESH = WRITER | {
    "name": "fresh",
    "agents": [],
    "models": ["fresh"],
    "recipe": "default",
    "serving": "fresh@0",
    "versions": 0,
    "waiting": 0,
}
REST = FRESH | {
    "name": "rest",
    "kind": "fixed",
    "models": ["rest", "qwen"],
    "recipe": None,
    "serving": None,
}
OLD = REST | {"name": "old", "kind": "unlisted", "base": "old", "models": [], "serving": "old@0"}


@pytest.mark.usefixtures("filled")
async def test_list_has_the_policies_of_the_file_and_those_of_the_store(
    pawl: Pawl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "p.toml").write_text(FILE)
    monkeypatch.setenv("PAWL_POLICIES", "p.toml")
    assert await lines(pawl, "list") == [WRITER, FRESH, REST, OLD]
    (tmp_path / "p.toml").write_text(exploring(FILE))
    assert (await lines(pawl, "list"))[0] == WRITER | {"recipe": "default", "explore": EXPLORES}


@pytest.mark.usefixtures("filled")
async def test_without_a_file_each_model_name_is_a_policy(
    pawl: Pawl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAWL_RECIPE", "single")
    trained = {"kind": "trained", "recipe": "single"}
    assert await lines(pawl, "list") == [
        OLD | trained | {"models": ["old"]},
        WRITER | trained | {"agents": [], "models": ["writer"]},
    ]


async def test_terminal_gets_a_table_of_policies(filled: AsyncEngine) -> None:
    table = parse_policies(FILE, "p.toml")
    head, writer, *_ = printed(policies_table(await policies_of(filled, table, "d")))
    assert head.split() == list(WRITER)
    assert writer.split() == [
        *("writer", "trained", "qwen", "writer", "writer,", "prose", "single", "writer@1", "1", "2")
    ]
    explores = parse_policies(exploring(FILE), "p.toml")
    shown = printed(policies_table(await policies_of(filled, explores, "d")), width=200)
    assert shown[0].split()[-1] == "explore"
    assert shown[1].rstrip().endswith(EXPLORES)
    assert shown[2].rstrip().endswith("0")


# show


@pytest.fixture
async def evaluated(engine: AsyncEngine) -> AsyncEngine:
    """`m` has four evaluated episodes, three of them right."""
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
        await ensure_base(connection, "other")
        for number in range(4):
            key = f"e{number}"
            await ingest(
                connection, [call(key, split="eval"), reward(float(number < 3), episode=key)]
            )
    return engine


@pytest.mark.usefixtures("evaluated")
async def test_show_has_each_version_with_its_evaluation(
    pawl: Pawl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"ended": False, "files_deleted": False, "altered": False, "unread": False}
    [line] = await lines(pawl, "show", "m")
    assert line == {
        "version": "m@0",
        "state": "serving",
        "eval_episodes": 4,
        "scored": 4,
        "mean": 0.75,
        "low": pytest.approx(0.3006, abs=1e-4),
        "high": pytest.approx(0.9544, abs=1e-4),
        **files,
    }
    [other] = await lines(pawl, "show", "other")
    assert (other["eval_episodes"], other["mean"], other["low"]) == (0, None, None)
    (tmp_path / "p.toml").write_text(
        '[[policy]]\nname = "m"\nbase = "m"\nexplore = { share = 0.1, temperature = 0.7 }'
    )
    monkeypatch.setenv("PAWL_POLICIES", "p.toml")
    assert await lines(pawl, "show", "m") == [line | {"explore": "share = 0.1, temperature = 0.7"}]
    missing = await pawl("policies", "show", "n")
    assert isinstance(missing.exception, UnknownPolicy)
    assert "no policy 'n' (known: m, other)" in str(missing.exception)


async def test_terminal_gets_a_table_of_versions(evaluated: AsyncEngine) -> None:
    base_line = ["m@0", "serving", "4", "4", "0.7500", "0.3006", "to", "0.9544"]
    head, base = printed(versions_table(await versions_of(evaluated, "m")))
    assert head.startswith("version")
    assert base.split() == base_line
    await train(evaluated, "m", {"kl_to_base": 0.25, "tokens_per_second": 900, "mfu": 0.4})
    policies = parse_policies(
        '[[policy]]\nname = "m"\nbase = "m"\nexplore = { share = 0.1, temperature = 0.7 }', "p.toml"
    )
    head, base, trained, caption = printed(
        versions_table(await versions_of(evaluated, "m", policies))
    )
    assert head.split()[-5:] == ["KL", "to", "base", "tokens/s", "MFU"]
    assert base.split() == base_line
    assert trained.split() == ["m@1", "written", "0", "0", "0.2500", "900", "0.4000"]
    assert caption.strip() == "explores: share = 0.1, temperature = 0.7"


# promote, rollback, freeze


async def test_frozen_traffic_is_moved_by_commands_alone(pawl: Pawl, engine: AsyncEngine) -> None:
    judge = gate(engine)
    await on_trial(engine, judge)
    frozen = await pawl("policies", "freeze", "m", "--reason", "release day")
    assert frozen.stdout == "m is frozen\n"
    await judge.look(engine)
    assert await states(engine) == {0: "serving", 1: "canary"}
    assert (await pawl("policies", "freeze", "m", "--off")).exit_code == 0
    await judge.look(engine)
    assert await states(engine) == {0: "published", 1: "serving"}
    said = [(line.reason, line.actor) for line in await events_of(engine, "m")]
    assert ("frozen: release day", "operator") in said


async def test_operator_promotes_the_tried_version_and_rolls_it_back(
    pawl: Pawl, engine: AsyncEngine
) -> None:
    await on_trial(engine, gate(engine))
    promoted = await pawl("policies", "promote", "m", "--reason", "seen by eye")
    assert promoted.stdout == "m@1 serves\n"
    last = (await events_of(engine, "m"))[-1]
    assert (last.reason, last.actor) == ("seen by eye", "operator")
    # What it came to so far is what a watch over it starts from.
    assert isinstance(last.evidence, dict)
    assert "reference" in last.evidence
    done = await pawl("policies", "rollback", "m@1", "--reason", "it swears")
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
        found = await pawl("policies", *words)
        assert isinstance(found.exception, error)
        assert said in str(found.exception)


async def test_figures_of_a_trial_are_shown(pawl: Pawl, engine: AsyncEngine) -> None:
    await on_trial(engine, gate(engine))
    [_, shown] = await lines(pawl, "show", "m")
    assert shown["trial"]["kind"] == "promote"
    assert shown["trial"]["arms"]["canary"]["mean"] == pytest.approx(0.95)
    assert versions_table(await versions_of(engine, "m")).caption is not None
    events = await lines(pawl, "show", "m", "--events")
    assert list(events[0]) == ["at", "version", "from_state", "to_state", "reason", "actor"]
    assert events_table(await events_of(engine, "m")).row_count == len(events)


@pytest.mark.parametrize(
    ("named", "found"),
    [("m", ("m", None)), ("m@3", ("m", 3)), ("a@b", ("a@b", None)), ("a@b@0", ("a@b", 0))],
)
def test_version_is_named_by_its_policy_and_number(
    named: str, found: tuple[str, int | None]
) -> None:
    assert split_name(named) == found
