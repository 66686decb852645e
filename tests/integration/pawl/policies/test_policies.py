"""`pawl policies list`, `show`, `promote`, `rollback` and `freeze`."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.commands import policy_traffic
from pawl.commands.policies import (
    events_table,
    policies_table,
    read_event_lines,
    read_policy_lines,
    read_version_lines,
    versions_table,
)
from pawl.operator_moves import split_name
from store import claims
from store.errors import UnknownPolicy, WrongVersionState
from store.policy_table import parse_policies
from store.version_queries import list_versions
from store.version_states import (
    await_approval,
    ensure_base,
    lock_version,
    mark_unloaded,
)
from tests.integration.conftest import Pawl
from tests.support.ledger import lineage
from tests.support.ledger.episodes import ingest
from tests.support.ledger.lineage import promote, trained
from tests.support.records import call, reward, statement
from tests.support.servers.fake_server import fake_model_server

FILE = """
[[policy]]
name = "writer"
base = "qwen"
agents = ["writer"]
models = ["prose", "writer"]
recipe = "ppo"
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
    return file.replace('recipe = "ppo"', f"explore = {{ {EXPLORES} }}")


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
        await claims.record_update(
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
    "recipe": "ppo",
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
async def test_policies_list_has_the_policies_of_the_policy_file_and_of_the_store(
    pawl: Pawl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "p.toml").write_text(FILE)
    monkeypatch.setenv("PAWL_POLICIES", "p.toml")
    assert await lines(pawl, "list") == [WRITER, FRESH, REST, OLD]
    (tmp_path / "p.toml").write_text(exploring(FILE))
    assert (await lines(pawl, "list"))[0] == WRITER | {"recipe": "default", "explore": EXPLORES}


@pytest.mark.usefixtures("filled")
async def test_without_a_policy_file_each_model_name_is_a_policy(
    pawl: Pawl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAWL_RECIPE", "ppo")
    trained = {"kind": "trained", "recipe": "ppo"}
    assert await lines(pawl, "list") == [
        OLD | trained | {"models": ["old"]},
        WRITER | trained | {"agents": [], "models": ["writer"]},
    ]


async def test_terminal_gets_a_table_of_policies(filled: AsyncEngine) -> None:
    table = parse_policies(FILE, "p.toml")
    head, writer, *_ = printed(policies_table(await read_policy_lines(filled, table, "d")))
    assert head.split() == list(WRITER)
    assert writer.split() == [
        *("writer", "trained", "qwen", "writer", "writer,", "prose", "ppo", "writer@1", "1", "2")
    ]
    explores = parse_policies(exploring(FILE), "p.toml")
    shown = printed(policies_table(await read_policy_lines(filled, explores, "d")), width=200)
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
                connection,
                [call(key, split="eval", task=key), reward(float(number < 3), episode=key)],
            )
    return engine


@pytest.mark.usefixtures("evaluated")
async def test_policies_show_has_each_version_with_its_evaluation(
    pawl: Pawl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"unloaded": False, "ended": False, "files_deleted": False}
    files |= {"altered": False, "unread": False, "arm": "serving"}
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


@pytest.mark.usefixtures("evaluated")
async def test_policies_show_has_the_live_reward_of_each_version(
    pawl: Pawl, engine: AsyncEngine
) -> None:
    await train(engine, "m", {})
    async with engine.begin() as connection:
        for number in range(6):
            key, version = f"w{number}", number // 4
            work = call(key, policy_version=version)
            paid = [reward(float(number % 4 == 0), episode=key)] if number < 5 else []
            await ingest(connection, [work, *paid])
    shown = [(one["live_reward"], one["live_episodes"]) for one in await lines(pawl, "show", "m")]
    assert shown == [(0.25, 4), (1.0, 1)]
    table = printed(
        versions_table(await read_version_lines(engine, "m", None, "default")), width=200
    )
    assert "live reward  of episodes" in table[0]
    [outlook] = [one["outlook"] for one in await lines(pawl, "show", "m") if "outlook" in one]
    assert outlook.startswith("about 5 of 6 episodes an hour count towards an update (of 6: 1 with")
    assert outlook in " ".join(" ".join(table).split())


async def test_terminal_gets_a_table_of_versions(evaluated: AsyncEngine) -> None:
    base_line = ["m@0", "serving", "4", "4", "0.7500", "0.3006", "to", "0.9544"]
    head, base = printed(versions_table(await read_version_lines(evaluated, "m", None, "default")))
    assert head.startswith("version")
    assert base.split() == base_line
    await train(evaluated, "m", {"kl_to_base": 0.25, "tokens_per_second": 900, "mfu": 0.4})
    policies = parse_policies(
        '[[policy]]\nname = "m"\nbase = "m"\nexplore = { share = 0.1, temperature = 0.7 }', "p.toml"
    )
    head, base, trained, caption = printed(
        versions_table(await read_version_lines(evaluated, "m", policies, "default"))
    )
    assert head.split()[-5:] == ["KL", "to", "base", "tokens/s", "MFU"]
    assert base.split() == base_line
    assert trained.split() == ["m@1", "written", "0", "0", "0.2500", "900", "0.4000"]
    assert caption.strip() == "explores: share = 0.1, temperature = 0.7"


# promote, rollback, freeze

BETTER = {"verdict": "better", "episodes": 120}
WAITS = "it waits for approval (`pawl policies promote`): it is better"


async def states(engine: AsyncEngine) -> dict[int, str]:
    async with engine.connect() as connection:
        return {one.version: one.state for one in await list_versions(connection, "m")}


@pytest.fixture
async def line(engine: AsyncEngine) -> AsyncEngine:
    """`m` has the versions 1 to 3, each trained from the one before; 1 serves, the others wait."""
    async with engine.begin() as connection:
        await trained(connection, 0, 1, 2)
        await promote(connection, "m", 1, rule={"control_share": 0.05})
    return engine


async def load(engine: AsyncEngine, number: int, *, waits: bool = False) -> None:
    async with engine.begin() as connection:
        await lineage.load(
            connection, "m", number, {"control_share": 0.05}, reason="probed", actor="trainer"
        )
        if waits:
            tried = await lock_version(connection, "m", number)
            await await_approval(
                connection, tried, reason=WAITS, actor="controller", evidence=BETTER
            )


async def test_freezing_a_policy_writes_an_event_with_reason_and_actor(
    pawl: Pawl, line: AsyncEngine
) -> None:
    frozen = await pawl("policies", "freeze", "m", "--reason", "release day")
    assert frozen.stdout == "m is frozen\n"
    assert (await pawl("policies", "freeze", "m", "--off")).stdout == "m is no longer frozen\n"
    said = [(event.reason, event.actor) for event in await read_event_lines(line, "m")]
    assert ("frozen: release day", "operator") in said


async def test_operator_promotes_the_waiting_version_and_rolls_back_to_the_control(
    pawl: Pawl, line: AsyncEngine
) -> None:
    await load(line, 2)
    promoted = await pawl("policies", "promote", "m", "--reason", "seen by eye")
    assert promoted.stdout == "m@2 serves\n"
    last = (await read_event_lines(line, "m"))[-1]
    assert (last.reason, last.actor) == ("seen by eye", "operator")
    assert await states(line) == {0: "retired", 1: "retired", 2: "serving", 3: "written"}
    done = await pawl("policies", "rollback", "m@2", "--reason", "it swears")
    # The base model is the control: nothing that served since was proven.
    assert done.stdout == "m@2 is rolled back\nm serves\n"
    fallen = {1: "rolled_back", 2: "rolled_back", 3: "rejected"}
    assert await states(line) == {0: "serving"} | fallen
    for words, error, said in (
        (("promote", "m@2"), WrongVersionState, "'rolled_back'"),
        (("promote", "m@3"), WrongVersionState, "'rejected'"),
        (("promote", "m@0"), WrongVersionState, "serves already"),
        (("promote", "m"), UnknownPolicy, "as m@N"),
        (("promote", "m@7"), UnknownPolicy, "no version 7"),
        (("rollback", "m"), WrongVersionState, "'serving'"),
        (("rollback", "n"), UnknownPolicy, "known: m"),
        (("freeze", "n"), UnknownPolicy, "known: m"),
    ):
        found = await pawl("policies", *words)
        assert isinstance(found.exception, error)
        assert said in str(found.exception)


async def test_promote_shows_a_waiting_versions_evidence_and_asks_to_confirm_in_a_terminal(
    pawl: Pawl, line: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await load(line, 2, waits=True)
    terminal = SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True), stderr=sys.stderr)
    with monkeypatch.context() as patched:
        patched.setattr(policy_traffic, "sys", terminal)
        unanswered = await pawl("policies", "promote", "m")
        assert unanswered.exit_code == 1
        assert "Promote m@2?" in unanswered.stdout
        assert (await states(line))[2] == "loaded"
    promoted = await pawl("policies", "promote", "m")
    assert promoted.stdout == (f'm@2: {WAITS}\n{{"verdict":"better","episodes":120}}\nm@2 serves\n')
    # What was shown is the proof that it was promoted with.
    assert (await read_event_lines(line, "m"))[-1].evidence == BETTER


async def test_policies_show_lists_arms_shares_and_the_reason_a_version_waits(
    pawl: Pawl, line: AsyncEngine
) -> None:
    await load(line, 2)
    await load(line, 3, waits=True)
    shown = await lines(pawl, "show", "m")
    keys = ("state", "arm", "share", "unloaded", "waits", "evidence")
    assert [{key: one[key] for key in keys if key in one} for one in shown] == [
        {"state": "retired", "arm": "control", "share": 0.05, "unloaded": False},
        {"state": "serving", "arm": "serving", "unloaded": False},
        {"state": "retired", "unloaded": True},
        {"state": "loaded", "unloaded": False, "waits": WAITS, "evidence": BETTER},
    ]
    table = printed(versions_table(await read_version_lines(line, "m", None, "default")), width=160)
    assert table[1].split()[:3] == ["m@0", "retired,", "control"]
    assert table[1].rstrip().endswith("0.0500")
    assert table[3].split()[:3] == ["m@2", "retired,", "unloaded"]
    assert f"m@3: {WAITS}" in " ".join(" ".join(table[5:]).split())
    events = await lines(pawl, "show", "m", "--events")
    assert list(events[0]) == ["at", "version", "from_state", "to_state", "reason", "actor"]
    assert events_table(await read_event_lines(line, "m")).row_count == len(events)


async def test_unloaded_version_is_recalled_and_promoted_after_servers_list_it(
    pawl: Pawl, line: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await load(line, 2)
    await load(line, 3)
    async with fake_model_server() as server:
        monkeypatch.setenv("PAWL_UPSTREAM_URL", server.url)
        monkeypatch.setattr(policy_traffic, "LOADED_WITHIN_S", 0.2)
        monkeypatch.setattr(policy_traffic, "ASKED_EVERY_S", 0.05)
        waited = await pawl("policies", "promote", "m@2")
        assert isinstance(waited.exception, WrongVersionState)
        assert "let a `pawl controller` run" in str(waited.exception)
        # It is servable from now on: a controller loads it.
        async with line.connect() as connection:
            assert not (await list_versions(connection, "m"))[2].unloaded
        async with line.begin() as connection:
            await mark_unloaded(connection, "m", [2], "idle", "trainer")
        server.loaded["m@2"] = "/m/2"
        promoted = await pawl("policies", "promote", "m@2")
    assert promoted.stdout == "m@2 serves\n"
    assert await states(line) == {0: "retired", 1: "retired", 2: "serving", 3: "loaded"}


@pytest.mark.parametrize(
    ("named", "found"),
    [("m", ("m", None)), ("m@3", ("m", 3)), ("a@b", ("a@b", None)), ("a@b@0", ("a@b", 0))],
)
def test_version_name_is_split_into_policy_and_number(
    named: str, found: tuple[str, int | None]
) -> None:
    assert split_name(named) == found
