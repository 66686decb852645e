"""A trainer without a gate: what it makes serves at once, and is watched if the recipe says so."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from store import version_states
from store.schema.tables import policies
from store.version_queries import numbered_version
from store.version_states import roll_back
from tests.support.servers.fake_server import fake_model_server
from tests.support.trainer.recovery import Bench, run_once
from trainer.recipes.recipe import GateOptions

WATCHED = GateOptions(base_share=0.1)


@pytest.fixture
async def bench(engine: AsyncEngine, tmp_path: Path) -> AsyncIterator[Bench]:
    async with fake_model_server() as server:
        made = Bench(engine, server, tmp_path)
        await made.fill()
        yield made


async def kept(bench: Bench) -> dict[int, tuple[float | None, bool]]:
    """The share and the rule of each version."""
    query = select(policies.c.version, policies.c.share, policies.c.gate)
    async with bench.engine.connect() as connection:
        rows = await connection.execute(query)
        return {row.version: (row.share, row.gate is not None) for row in rows}


async def test_by_default_the_base_model_gets_no_episodes_and_nothing_is_watched(
    bench: Bench,
) -> None:
    assert await run_once(bench)
    assert await bench.states() == {0: "published", 1: "serving"}
    assert await kept(bench) == {0: (None, False), 1: (None, False)}


async def test_with_a_base_share_each_version_serves_at_once_with_the_rule_it_is_watched_by(
    bench: Bench,
) -> None:
    bench.gate = WATCHED
    assert await run_once(bench)
    assert await bench.states() == {0: "published", 1: "serving"}
    assert await kept(bench) == {0: (0.1, False), 1: (None, True)}
    # Back to none: from the next version on the base model gets no episodes any more.
    bench.gate = GateOptions()
    await bench.fill("u")
    assert await run_once(bench)
    assert await kept(bench) == {0: (None, False), 1: (None, True), 2: (None, False)}


async def test_after_several_were_rolled_back_training_goes_on_from_what_serves_again(
    bench: Bench,
) -> None:
    bench.gate = WATCHED
    for name in ("t", "u", "v"):
        await bench.fill(name)
        assert await run_once(bench)
    assert (await bench.states())[3] == "serving"
    async with bench.engine.begin() as connection:
        first = await numbered_version(connection, "m", 2)
        last = await numbered_version(connection, "m", 3)
        assert first is not None
        assert last is not None
        why = "it is worse"
        before = await roll_back(connection, last, reason=why, actor="steward", first=first)
    assert before is not None
    assert before.version == 1
    assert await bench.states() == {
        0: "published",
        1: "serving",
        2: "rolled_back",
        3: "rolled_back",
    }
    await bench.fill("w")
    assert await run_once(bench)
    folder = bench.learner.restored
    assert folder is not None
    assert folder.name == "1"
    assert (await bench.states())[4] == "serving"


async def test_a_version_is_watched_from_the_moment_that_it_serves(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule is there before the traffic is, in the same transaction."""
    bench.gate = WATCHED
    real, seen = version_states.watch, []

    async def watch(*args: object) -> None:
        seen.append(await bench.states())
        await real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(version_states, "watch", watch)
    assert await run_once(bench)
    assert seen == [{0: "serving", 1: "written"}]
