"""Moving baselines through the trainer's loop: as once as the episodes they come from."""

from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from tests.support.ledger.episodes import ingest
from tests.support.records import call, reward, tokens
from tests.support.trainer.bench import STEPS, Bench
from trainer.credit.moving import EVERY_FAMILY
from trainer.errors import LearnerError
from trainer.recipes.recipe import ClaimOptions, CreditOptions, Recipe

RECIPE = Recipe(
    claim=ClaimOptions(group_size=1, groups=4, max_age_s=1e9),
    credit=CreditOptions(normalisation="batch", air_lambda=0.0),
)


async def left(engine: AsyncEngine) -> list[Any]:
    """(state, baselines) of all updates in the order of their claims."""
    query = text("SELECT state, baselines FROM updates ORDER BY claimed_at")
    async with engine.connect() as connection:
        return [tuple(row) for row in await connection.execute(query)]


def seen(baselines: Any) -> Any:
    """Mean and count of all families together."""
    every = baselines["families"][EVERY_FAMILY][""]
    return every["mean"], every["count"]


@pytest.fixture
async def bench(bare: Bench) -> Bench:
    """A trainer that takes episodes one by one."""
    bare.recipe = RECIPE
    await bare.fill("t/a")
    return bare


async def test_moving_baselines_are_stored_with_the_update_and_continued(bench: Bench) -> None:
    assert await bench.run_once()
    await bench.fill("t/b")
    assert await bench.run_once()
    found = await left(bench.engine)
    assert [state for state, _ in found] == ["done", "done"]
    assert [seen(baselines) for _, baselines in found] == [(0.5, 4), (0.5, 8)]


@pytest.mark.parametrize("step", ["before the version exists", "after the version exists"])
async def test_trainer_killed_in_an_update_counts_no_return_twice_in_the_moving_baselines(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    await bench.run_killed(monkeypatch, STEPS[step])
    await bench.run_once()
    await bench.assert_spent_once(4)
    done = [baselines for state, baselines in await left(bench.engine) if state == "done"]
    assert [seen(baselines) for baselines in done] == [(0.5, 4)]


async def test_update_that_trains_nothing_still_moves_the_baselines(bench: Bench) -> None:
    await bench.run_once()
    bench.learner.fails = LearnerError("the gradient's norm is nan")
    records = [call(f"v{n}", task=f"t/v{n}", tokens=tokens([1], [n])) for n in range(4)]
    async with bench.engine.begin() as connection:
        await ingest(connection, records)
        for record in records:
            await ingest(connection, [reward(0.5, episode=record.episode)])
    assert await bench.run_once()
    # What fails is free again, and has moved nothing.
    await bench.fill("t/b")
    assert not await bench.run_once()
    found = [baselines for state, baselines in await left(bench.engine) if state == "done"]
    assert [seen(baselines)[1] for baselines in found] == [4, 8]
    assert await bench.states() == {0: "retired", 1: "serving"}
