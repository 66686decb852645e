"""`pawl policies list`: those of the file, and those that have versions."""

import asyncio
import json
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from sqlalchemy.ext.asyncio import AsyncEngine
from typer.testing import CliRunner

from pawl.cli import app
from pawl.commands.policies import policies_of, policies_table
from store import claims
from store.policy_table import parse_policies
from store.version_states import ensure_base
from store.write.ingest import ingest
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


@pytest.fixture
async def filled(engine: AsyncEngine) -> AsyncEngine:
    """`writer` has version 1, and one episode of two waits; `old` is in the store alone."""
    async with engine.begin() as connection:
        await ensure_base(connection, "old")
        await ensure_base(connection, "writer", "qwen")
        update = await claims.begin_update(connection, "writer", 0, {})
        await claims.consume(
            connection, update, (), {}, policy="writer", version=1, adapter_path="/a/1"
        )
        await promote(connection, "writer", 1, reason="for the test", actor="operator")
        scored = call("scored", policy="writer")
        paid = call("paid", policy="writer")
        records = [scored, paid, call("open", policy="writer"), reward(1.0, episode="scored")]
        await ingest(connection, [*records, statement("reward", 1.0, call=str(paid.id))])
    return engine


async def test_the_file_says_what_each_answers_and_the_store_how_far_it_is(
    filled: AsyncEngine,
) -> None:
    lines = await policies_of(filled, parse_policies(FILE, "p.toml"), "default")
    writer, fresh, rest, old = lines
    assert (writer.name, writer.kind, writer.base, writer.recipe) == (
        *("writer", "trained", "qwen"),
        "single",
    )
    assert (writer.agents, writer.models) == (("writer",), ("writer", "prose"))
    assert (writer.serving, writer.versions, writer.waiting) == ("writer@1", 1, 2)
    assert (fresh.recipe, fresh.serving, fresh.versions) == ("default", "fresh@0", 0)
    assert (rest.kind, rest.models, rest.recipe) == ("fixed", ("rest", "qwen"), None)
    assert rest.serving is None
    assert (old.name, old.kind, old.models, old.serving) == ("old", "unlisted", (), "old@0")


async def test_without_a_file_each_model_name_is_a_policy(filled: AsyncEngine) -> None:
    old, writer = await policies_of(filled, None, "single")
    assert (old.name, old.kind, old.base, old.models) == ("old", "trained", "old", ("old",))
    assert (writer.recipe, writer.serving, writer.waiting) == ("single", "writer@1", 2)


async def test_a_terminal_gets_a_table(filled: AsyncEngine) -> None:
    console = Console(width=120)
    with console.capture() as shown:
        console.print(
            policies_table(await policies_of(filled, parse_policies(FILE, "p.toml"), "d"))
        )
    head, writer, *_ = shown.get().splitlines()
    assert head.split() == [
        *("name", "kind", "base", "agents", "models", "recipe", "serving", "versions", "waiting")
    ]
    assert writer.split() == [
        *("writer", "trained", "qwen", "writer", "writer,", "prose", "single", "writer@1", "1", "2")
    ]


async def test_the_command_writes_lines_of_json(
    filled: AsyncEngine, database_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.toml").write_text(FILE)
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("PAWL_POLICIES", "p.toml")
    found = await asyncio.to_thread(CliRunner().invoke, app, ["policies", "list", "--json"])
    lines = [json.loads(text) for text in found.stdout.splitlines()]
    assert [line["name"] for line in lines] == ["writer", "fresh", "rest", "old"]
    assert lines[0] == {
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


async def test_a_policy_that_explores_is_seen_to_do_so(filled: AsyncEngine) -> None:
    explores = FILE.replace(
        'recipe = "single"\n', "explore = { share = 0.1, temperature = 0.7, drop_strict = true }\n"
    )
    lines = await policies_of(filled, parse_policies(explores, "p.toml"), "d")
    told = "share = 0.1, temperature = 0.7, drop_strict = true"
    assert [json.loads(msgspec.json.encode(line)).get("explore") for line in lines] == [
        *(told, None, None),
        None,
    ]
    console = Console(width=200)
    with console.capture() as shown:
        console.print(policies_table(lines))
    head, writer, fresh, *_ = shown.get().splitlines()
    assert head.split()[-1] == "explore"
    assert writer.rstrip().endswith(told)
    assert fresh.rstrip().endswith("0")
