"""`pawl policies show`: the versions of a policy, and what evaluation says of them."""

import asyncio
import json
from pathlib import Path

import pytest
from msgspec import UNSET
from rich.console import Console
from sqlalchemy.ext.asyncio import AsyncEngine
from typer.testing import CliRunner

from pawl.cli import app
from pawl.commands.policies import versions_of, versions_table
from store import claims
from store.errors import UnknownPolicy
from store.policy_table import load_policies
from store.version_states import ensure_base
from store.write.ingest import ingest
from tests.support.records import call, reward


@pytest.fixture
async def filled(engine: AsyncEngine) -> AsyncEngine:
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
        await ensure_base(connection, "other")
        for number in range(4):
            key = f"e{number}"
            await ingest(
                connection, [call(key, split="eval"), reward(float(number < 3), episode=key)]
            )
    return engine


async def test_each_version_has_its_evaluation(filled: AsyncEngine) -> None:
    [line] = await versions_of(filled, "m")
    assert (line.version, line.state, line.eval_episodes, line.scored) == ("m@0", "serving", 4, 4)
    assert (line.mean, line.low, line.high) == pytest.approx((0.75, 0.3006, 0.9544), abs=1e-4)
    [other] = await versions_of(filled, "other")
    assert (other.eval_episodes, other.mean, other.low) == (0, None, None)


async def test_an_unknown_policy_is_told_from_those_that_there_are(filled: AsyncEngine) -> None:
    with pytest.raises(UnknownPolicy, match=r"no policy 'n' \(known: m, other\)"):
        await versions_of(filled, "n")


async def test_a_terminal_gets_a_table(filled: AsyncEngine) -> None:
    console = Console(width=100)
    with console.capture() as shown:
        console.print(versions_table(await versions_of(filled, "m")))
    head, line = shown.get().splitlines()
    assert head.startswith("version")
    assert line.split() == ["m@0", "serving", "4", "4", "0.7500", "0.3006", "to", "0.9544"]


async def test_the_command_writes_lines_of_json(
    filled: AsyncEngine, database_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATABASE_URL", database_url)
    command = ["policies", "show", "m", "--json"]
    found = await asyncio.to_thread(CliRunner().invoke, app, command)
    [line] = [json.loads(text) for text in found.stdout.splitlines()]
    assert list(line) == [
        *("version", "state", "eval_episodes", "scored"),
        *("mean", "low", "high", "ended", "files_deleted", "altered", "unread"),
    ]
    missing = await asyncio.to_thread(CliRunner().invoke, app, ["policies", "show", "n"])
    assert isinstance(missing.exception, UnknownPolicy)


async def test_how_far_a_version_is_from_the_base_model_is_shown(filled: AsyncEngine) -> None:
    async with filled.begin() as connection:
        update = await claims.begin_update(connection, "m", 0, {})
        metrics = {"kl_to_base": 0.25}
        await claims.consume(
            connection, update, (), metrics, policy="m", version=1, adapter_path="/gone"
        )
    base, trained = await versions_of(filled, "m")
    assert (base.kl_to_base, trained.kl_to_base) == (UNSET, 0.25)
    console = Console(width=100)
    with console.capture() as shown:
        console.print(versions_table([base, trained]))
    head, _, line = shown.get().splitlines()
    assert head.endswith("KL to base")
    assert line.split() == ["m@1", "written", "0", "0", "0.2500"]


async def test_the_version_that_serves_is_seen_to_explore(
    filled: AsyncEngine, database_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.toml").write_text(
        '[[policy]]\nname = "m"\nbase = "m"\nexplore = { share = 0.1, temperature = 0.7 }'
    )
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("PAWL_POLICIES", "p.toml")
    command = ["policies", "show", "m", "--json"]
    found = await asyncio.to_thread(CliRunner().invoke, app, command)
    assert json.loads(found.stdout)["explore"] == "share = 0.1, temperature = 0.7"
    console = Console(width=100)
    with console.capture() as shown:
        console.print(
            versions_table(await versions_of(filled, "m", load_policies(tmp_path / "p.toml")))
        )
    assert shown.get().splitlines()[-1].strip() == "explores: share = 0.1, temperature = 0.7"
