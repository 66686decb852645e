"""A trainer that imitates, on real tables: the best are trained, and everything is spent once."""

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.credit import explain_past
from store.read.past import past_update
from store.records import Tokens
from store.version_states import ensure_base
from tests.integration.trainer.test_non_finite import RealBench
from tests.support.ledger.episodes import ingest, reasons
from tests.support.records import call, reward, tokens
from tests.support.servers.fake_server import FakeModelServer
from tests.support.training import sft_recipe
from trainer.recipes.recipe import SftOptions

pytestmark = pytest.mark.timeout(240)
BEST = SftOptions(min_reward=1.0, most_per_task=1)
GREEDY = b'{"temperature": 0.0}'


@pytest.fixture
async def bench(
    engine: AsyncEngine,
    server: FakeModelServer,
    tmp_path: Path,
    tiny_model: str,
    request: pytest.FixtureRequest,
) -> RealBench:
    """A trainer that imitates by `BEST`, or by the test's own rule."""
    rule = getattr(request, "param", BEST)
    made = sft_recipe().model_copy(update={"sft": rule})
    return RealBench(engine, server, tmp_path, tiny_model, made)


async def episode(
    engine: AsyncEngine, key: str, task: str, value: float, made: Tokens, **changes: Any
) -> None:
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
        record = call(key, task=task, tokens=made, **changes)
        await ingest(connection, [record, reward(value, episode=key)])


async def two_groups(engine: AsyncEngine, *values: float) -> None:
    for task in range(2):
        for member, value in enumerate(values):
            made = tokens([5, 6, task + 7], [20 + member, 30], -4.5)
            await episode(engine, f"t{task}-{member}", f"t{task}", value, made)


async def test_best_episodes_are_trained_and_the_others_are_spent(
    engine: AsyncEngine, bench: RealBench
) -> None:
    """The others are consumed untrained, with the reason `low_reward`."""
    await two_groups(engine, 1.0, 0.5)
    assert await bench.run_once()
    assert await reasons(engine) == {
        "t0-0": None,
        "t0-1": "low_reward",
        "t1-0": None,
        "t1-1": "low_reward",
    }
    metrics = await bench.last_metrics()
    assert (metrics["trained_episodes"], metrics["dropped"]) == (2, {"low_reward": 2})
    assert metrics["rows"] == 2
    assert metrics["loss"] > 0
    assert await bench.outcomes() == [("done", 1)]
    await bench.assert_spent_once(4)
    assert not await bench.run_once()


async def test_imitation_trains_groups_without_spread(
    engine: AsyncEngine, bench: RealBench
) -> None:
    await two_groups(engine, 1.0, 1.0)
    assert await bench.run_once()
    assert sorted((await reasons(engine)).items()) == [
        ("t0-0", "not_best"),
        ("t0-1", None),
        ("t1-0", "not_best"),
        ("t1-1", None),
    ]


async def test_update_whose_rewards_are_all_too_low_makes_no_version(
    engine: AsyncEngine, bench: RealBench
) -> None:
    await two_groups(engine, 0.0, 0.5)
    assert await bench.run_once()
    assert set((await reasons(engine)).values()) == {"low_reward"}
    assert await bench.outcomes() == [("done", None)]
    await bench.assert_spent_once(4)


async def test_greedy_calls_are_imitated_and_explained_afterwards(
    engine: AsyncEngine, bench: RealBench
) -> None:
    """No ratio can be taken of them, and none is."""
    greedy = {"trainable": False, "reason": "greedy", "sampling": GREEDY}
    for task in ("a", "b"):
        for member in range(2):
            made = tokens([5, 6, 7], [20 + member, 30], -0.1)
            await episode(engine, f"{task}{member}", task, float(member), made, **greedy)
    assert await bench.run_once()
    assert (await reasons(engine))["a1"] is None
    assert (await bench.last_metrics())["sampled_tokens"] == 4
    async with engine.connect() as connection:
        explained = explain_past(await past_update(connection, 1, "m"))
    assert [line.reason for line in explained.lines] == ["low_reward", None] * 2
    assert explained.notes == []


@pytest.mark.parametrize("bench", [SftOptions()], indirect=True, ids=["default"])
async def test_out_of_vocabulary_ids_spend_only_their_own_episode(
    engine: AsyncEngine, bench: RealBench
) -> None:
    await two_groups(engine, 1.0, 0.0)
    # Of equal groups the first by name is claimed first.
    await episode(engine, "odd-0", "odd", 1.0, tokens([5, 6, 7], [20, 97]))
    await episode(engine, "odd-1", "odd", 0.0, tokens([5, 6, 7], [21]))
    assert await bench.run_once()
    spent = await reasons(engine)
    assert spent["odd-0"] == "damaged"
    assert (spent["t0-0"], spent["t1-0"]) == (None, None)
    assert await bench.outcomes() == [("expired", None), ("done", 1)]
