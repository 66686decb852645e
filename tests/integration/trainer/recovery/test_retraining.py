"""A policy's line starts again beside a trainer: nothing of the old line serves, or is lost."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import text

from controller import reconciler
from controller.publishing import Publishing
from pawl.commands import policy_traffic
from pawl.operator_moves import read_query, retrain_by_hand
from store import claims
from store.retraining import Retrained
from store.version_states import mark_unloaded
from tests.support.controller.replicas import reconcile
from tests.support.trainer.bench import STEPS, Bench, FakeLearner
from trainer.publishing import adapters
from trainer.publishing.model_server import Replicas

# Where in an update from version 2 the line starts again at version 1.
MOMENTS: dict[str, tuple[Any, str]] = {
    "before the claim": (claims, "claim"),
    "in training": (FakeLearner, "update"),
    "while saving": (FakeLearner, "save"),
    "before the record": (claims, "record_update"),
    "before publishing": (Publishing, "_publish"),
    "after loading": (reconciler, "check_served"),
}


async def trained(bench: Bench, *waves: str) -> None:
    """Make a version of the bench's episodes, and another of each wave."""
    assert await bench.run_once()
    await bench.update(*waves)


async def again(bench: Bench, start: int, *without: str, dry_run: bool = False) -> Retrained:
    return await retrain_by_hand(
        bench.engine,
        "m",
        start,
        [read_query(query) for query in without],
        "wrong rewards",
        dry_run=dry_run,
        wait_until_loaded=policy_traffic.wait_until_loaded,
    )


async def trained_from(bench: Bench) -> dict[int, int]:
    """Return the parent of each version whose update counts."""
    query = "SELECT version, parent_version FROM updates WHERE state = 'done' AND version > 0"
    async with bench.engine.connect() as connection:
        return {row[0]: row[1] for row in await connection.execute(text(query))}


async def test_retraining_continues_from_the_start_version_on_freed_episodes(bench: Bench) -> None:
    await trained(bench, "u", "v")
    retrained = await again(bench, 1, "episode=u0-0", "task=v1")
    assert (retrained.freed, retrained.left_out) == ({"trained": 8}, 3)
    # One task is left whole; a new one joins it.
    await bench.update("w")
    assert bench.learner.restored == adapters.version_folder(bench.folder, "m", 1)
    states = await bench.states()
    assert [number for number, state in states.items() if state == "serving"] == [4]
    assert (await trained_from(bench)) == {1: 0, 4: 1}


async def test_dry_run_of_retraining_reports_the_same_result_and_changes_nothing(
    bench: Bench,
) -> None:
    await trained(bench, "u")
    before = await bench.states()
    expected = await again(bench, 1, "u0-0", dry_run=True)
    assert await bench.states() == before
    await bench.assert_spent_once(8)
    assert await again(bench, 1, "u0-0") == expected


async def test_retraining_can_start_from_the_base_model(bench: Bench) -> None:
    await trained(bench, "u")
    retrained = await again(bench, 0)
    assert (retrained.serves, retrained.freed) == ("m", {"trained": 8})
    assert await bench.states() == {0: "serving", 1: "retired", 2: "retired"}
    assert await bench.run_once()
    assert bench.learner.restored is None


async def test_unloaded_start_version_is_loaded_before_retraining_begins(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await trained(bench, "u", "v")
    async with bench.engine.begin() as connection:
        assert await mark_unloaded(connection, "m", [1], "idle", "trainer") == {1}
    bench.fake.loaded.pop("m@1")
    monkeypatch.setenv("PAWL_UPSTREAM_URL", bench.fake.url)
    monkeypatch.setattr(policy_traffic, "ASKED_EVERY_S", 0.01)
    async with Replicas([bench.fake.url]) as servers:
        retraining = asyncio.create_task(again(bench, 1))
        while not retraining.done():
            await reconcile(bench.engine, servers)
        await retraining
    assert bench.fake.loads[-1] == "m@1"
    assert (await bench.states())[1] == "serving"


@pytest.mark.parametrize("moment", MOMENTS)
async def test_retraining_begun_during_an_update_trains_only_from_the_start_version(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    await trained(bench, "u")
    await bench.fill("v")
    owner, name = MOMENTS[moment]
    real, loop = getattr(owner, name), asyncio.get_running_loop()

    async def first(*args: Any, **more: Any) -> Any:
        monkeypatch.undo()
        await again(bench, 1)
        return await real(*args, **more)

    def first_in_a_thread(*args: Any, **more: Any) -> Any:
        monkeypatch.undo()
        asyncio.run_coroutine_threadsafe(again(bench, 1), loop).result(20)
        return real(*args, **more)

    is_async = asyncio.iscoroutinefunction(real)
    monkeypatch.setattr(owner, name, first if is_async else first_in_a_thread)
    await bench.run_once()
    while await bench.run_once():
        pass
    parents = await trained_from(bench)
    states = await bench.states()
    serving = next(number for number, state in states.items() if state == "serving")
    assert serving == max(parents)
    # Each version that counts was trained from the start, or from another that counts.
    assert parents.pop(1) == 0
    assert all(parent == 1 or parent in parents for parent in parents.values())
    await bench.assert_spent_once(12)


@pytest.mark.parametrize("step", STEPS)
async def test_retraining_begun_after_a_kill_trains_only_from_the_start_version(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    await trained(bench, "u")
    await bench.fill("v")
    await bench.run_killed(monkeypatch, STEPS[step])
    await again(bench, 1)
    while await bench.run_once():
        pass
    parents = await trained_from(bench)
    assert parents.pop(1) == 0
    assert all(parent == 1 or parent in parents for parent in parents.values())
    await bench.assert_spent_once(12)
