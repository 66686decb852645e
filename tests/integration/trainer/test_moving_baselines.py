"""Moving baselines through the trainer's loop: as once as the episodes they come from."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from store.write.ingest import ingest
from tests.support.faults.killing import Killed
from tests.support.records import call, reward, tokens
from tests.support.servers.fake_server import fake_model_server
from tests.support.trainer.recovery import STEPS, Bench, FakeLearner, run_once
from trainer.errors import LearnerError
from trainer.loop import Loop
from trainer.publishing.model_server import Replicas
from trainer.publishing.publisher import Publisher
from trainer.recipes.recipe import ClaimOptions, CreditOptions, Recipe
from trainer.settings import TrainerSettings

RECIPE = Recipe(
    claim=ClaimOptions(group_size=1, groups=4, max_age_s=1e9),
    credit=CreditOptions(baseline="moving", normalisation="batch", air_lambda=0.0),
)


class MovingBench(Bench):
    """A loop that takes episodes one by one."""

    def loop(self, server: Replicas) -> Loop:
        publisher = Publisher(self.engine, server, "m", RECIPE.publish)
        settings = TrainerSettings.model_validate({"adapter_dir": self.folder})
        return Loop(settings, RECIPE, self.engine, publisher, self.learner, "m")


async def left(engine: AsyncEngine) -> list[Any]:
    """(state, baselines) of all updates in the order of their claims."""
    query = text("SELECT state, baselines FROM updates ORDER BY claimed_at")
    async with engine.connect() as connection:
        return [tuple(row) for row in await connection.execute(query)]


def seen(baselines: Any) -> Any:
    """Mean and count of the only family and agent."""
    [agents] = baselines["families"].values()
    return agents["default"]["mean"], agents["default"]["count"]


@pytest.fixture
async def bench(engine: AsyncEngine, tmp_path: Path) -> AsyncIterator[Bench]:
    async with fake_model_server() as server:
        made = MovingBench(engine, server, tmp_path)
        await made.fill("t/a")
        yield made


async def test_they_stand_in_the_row_that_consumes_and_go_on(bench: Bench) -> None:
    assert await run_once(bench)
    await bench.fill("t/b")
    assert await run_once(bench)
    found = await left(bench.engine)
    assert [state for state, _ in found] == ["done", "done"]
    assert [seen(baselines) for _, baselines in found] == [(0.5, 4), (0.5, 8)]


@pytest.mark.parametrize("step", ["before the version exists", "after the version exists"])
async def test_a_kill_counts_no_return_twice(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    STEPS[step](monkeypatch)
    with pytest.raises(Killed):
        await run_once(bench)
    bench.learner = FakeLearner(bench.fake, bench.folder.resolve())
    await run_once(bench)
    await bench.assert_spent_once(4)
    done = [baselines for state, baselines in await left(bench.engine) if state == "done"]
    assert [seen(baselines) for baselines in done] == [(0.5, 4)]


async def test_an_update_that_trains_nothing_still_moves_them(bench: Bench) -> None:
    await run_once(bench)
    bench.learner.fails = LearnerError("the gradient's norm is nan")
    records = [call(f"v{n}", task=f"t/v{n}", tokens=tokens([1], [n])) for n in range(4)]
    async with bench.engine.begin() as connection:
        await ingest(connection, records)
        for record in records:
            await ingest(connection, [reward(0.5, episode=record.episode)])
    assert await run_once(bench)
    # What fails is free again, and has moved nothing.
    await bench.fill("t/b")
    assert not await run_once(bench)
    found = [baselines for state, baselines in await left(bench.engine) if state == "done"]
    assert [seen(baselines)[1] for baselines in found] == [4, 8]
    assert await bench.states() == {0: "published", 1: "serving"}
