"""`pawl policies rebuild`: what it would do, and what it refuses before anything is changed."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from click.testing import Result
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine
from typer.testing import CliRunner

from pawl.cli import app
from pawl.policies.queries import BadQuery
from store.deleting.delete import delete_episode
from store.errors import UnknownPolicy
from store.keys import create_key, revoke_key
from store.rebuilding.choosing import UnknownNames
from store.records import SpoolRecord
from store.schema.recorded import episodes
from store.updates.ready import ClaimRule
from store.version_states import ensure_base
from store.write.ingest import ingest
from tests.support.ledger.lineage import promote
from tests.support.ledger.updates import claimed, consume_all
from tests.support.records import call, reward
from trainer.recipes.recipe import Recipe

RULE = ClaimRule(policy="m", group_size=2, groups=2, smallest_group=2, max_age_s=1e9)
Run = Callable[..., Awaitable[Result]]


@pytest.fixture
async def run(
    engine: AsyncEngine, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Run:
    """`pawl policies rebuild`, for a policy `m` with two updates of four episodes, and one free."""
    for version in (1, 2):
        await fill(engine, version)
    async with engine.begin() as connection:
        await ingest(connection, [call("free", task="free", agent="judge")])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("PAWL_ADAPTER_DIR", "adapters")

    async def invoke(*arguments: str) -> Result:
        command = ["policies", "rebuild", *arguments]
        return await asyncio.to_thread(CliRunner().invoke, app, command)

    return invoke


async def fill(engine: AsyncEngine, version: int) -> None:
    records: list[SpoolRecord] = []
    for number in range(4):
        key = f"u{version}/e{number}"
        records.append(call(key, task=f"t{version}{number % 2}", policy_version=version - 1))
        records.append(reward(number / 2, at=100 * version, episode=key))
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
        await ingest(connection, records)
    claim = await claimed(engine, RULE, version - 1, Recipe().model_dump(mode="json"))
    assert claim is not None
    await consume_all(engine, claim, version=version)
    async with engine.begin() as connection:
        await promote(connection, "m", version, reason="better", actor="operator")


async def told(run: Run, *queries: str) -> dict[str, object]:
    asked = [word for query in queries for word in ("--without", query)]
    result = await run("m", *asked, "--dry-run")
    assert result.exit_code == 0, result.output
    read: dict[str, object] = json.loads(result.stdout)
    return read


@pytest.mark.parametrize(
    ("query", "found", "waiting"),
    [
        ("u1/e0", 1, 0),
        ("prefix=u1/", 4, 0),
        ("prefix=u", 8, 0),
        ("task=t20", 2, 0),
        ("task=t20,prefix=u1/", 0, 0),
        ("agent=default", 8, 0),
        ("agent=judge", 0, 1),
        ("since=2000-01-01", 8, 1),
        ("before=2000-01-01", 0, 0),
        ("before=2100-01-01,prefix=u2/", 4, 0),
        ("scored-since=2026-01-01T12:03:00+00:00", 4, 0),
        ("scored-before=2026-01-01T12:03:00+00:00", 4, 0),
        ("scored-since=2026-01-01T12:02:00Z,scored-before=2026-01-01T12:03:00Z", 0, 0),
    ],
)
async def test_what_a_query_selects(run: Run, query: str, found: int, waiting: int) -> None:
    said = await told(run, query)
    assert (said["episodes"], said["waiting"]) == (found, waiting)
    assert said["replaces"] == "m@2"
    # No optimiser state is there to begin from later.
    assert (said["begins_at"], said["updates"]) == ("m@0", 2 if found else 0)


async def test_a_key_is_told_by_its_name_or_id_and_by_what_came_with_it(
    run: Run, engine: AsyncEngine
) -> None:
    async with engine.begin() as connection:
        keys = [await create_key(connection, name, ("infer", "feedback")) for name in ("a", "b")]
        await revoke_key(connection, "a")
        again = await create_key(connection, "a", ("infer",))
        of_other = await create_key(connection, "theirs", ("infer",), tenant="t")
        calls = {"u1/e0": keys[0], "u1/e1": again, "u2/e0": keys[1]}
        records: list[SpoolRecord] = [
            call(episode, api_key=key.about.id) for episode, key in calls.items()
        ]
        said = reward(0.0, at=1000, episode="u2/e1")
        records.append(msgspec.structs.replace(said, api_key=keys[1].about.id))
        await ingest(connection, records)
    counts = {
        "key=a": 2,
        f"key={again.about.id}": 1,
        "key=b": 2,
        "key=b,prefix=u1/": 0,
    }
    assert {query: (await told(run, query))["episodes"] for query in counts} == counts
    for unknown in ("c", "theirs", of_other.about.id):
        result = await run("m", "--without", f"key={unknown}", "--dry-run")
        assert isinstance(result.exception, UnknownNames)
        assert repr(unknown) in str(result.exception)


async def test_several_queries_add_up_and_nothing_is_changed(run: Run, engine: AsyncEngine) -> None:
    assert (await told(run, "u1/e0", "u1/e0", "task=t20", "agent=judge")) == {
        "policy": "m",
        "replaces": "m@2",
        "begins_at": "m@0",
        "updates": 2,
        "episodes": 3,
        "waiting": 1,
        "missing": [],
    }
    assert (await told(run, "u1/e0"))["episodes"] == 1


async def test_what_was_deleted_is_named(run: Run, engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        query = select(episodes.c.id).where(episodes.c.key == "u2/e3")
        whole = (await connection.execute(query)).scalar_one()
        await delete_episode(connection, whole)
    [missing] = (await told(run, "u1/e0"))["missing"]  # type: ignore[misc]
    assert (missing["episode_id"], missing["why"]) == (str(whole), "deleted")
    said = await run("m", "--leave-out-missing", "--dry-run")
    assert json.loads(said.stdout)["episodes"] == 1
    refused = await run("m", "--without", "u1/e0")
    assert "refused, because 1 more episodes cannot be read any more" in refused.stderr


async def test_what_is_wrong_is_told_and_changes_nothing(run: Run) -> None:
    nothing = await run("m")
    assert nothing.exit_code == 2
    assert "say what to leave out, with --without" in nothing.stderr
    unknown = await run("m", "--without", "e9")
    assert isinstance(unknown.exception, UnknownNames)
    assert "1 of these episodes are not recorded ('e9')" in str(unknown.exception)
    assert isinstance((await run("m", "--without", "since=x")).exception, BadQuery)
    assert isinstance((await run("n", "--without", "e9")).exception, UnknownPolicy)
    others = await run("m", "--without", "u1/e0", "--tenant", "acme")
    assert others.exit_code == 2
    assert "there is no policy 'm' of tenant 'acme'" in others.stderr
    assert (await run("m", "--without", "u1/e0", "--tenant", "a b")).exit_code == 2
    unasked = await run("m", "--without", "u1/e0")
    assert unasked.exit_code == 2
    assert "2 updates of m are trained again from m@0, without 1 episodes" in unasked.stderr
    assert "standard input is no terminal: add --yes" in unasked.stderr
    assert (await told(run, "u1/e0"))["updates"] == 2
