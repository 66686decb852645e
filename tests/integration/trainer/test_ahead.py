"""While a version is published its trainer claims and plans the next update, and never twice."""

import asyncio
from contextlib import nullcontext
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from store.version_states import hold_training, resume_training
from tests.support.trainer.bench import Bench
from tests.support.trainer.policies import Policies
from trainer.errors import LearnerError
from trainer.loop import Loop
from trainer.recipes.recipe import ClaimOptions, CreditOptions, Recipe
from trainer.updates.training_warnings import training_warnings


@pytest.fixture
async def bench(bench: Bench) -> Bench:
    """Episodes for two updates, the latter ones for the first."""
    await bench.fill("u")
    return bench


async def held(engine: AsyncEngine) -> int:
    """Return how many episodes are held by an update that has not ended."""
    query = (
        "SELECT count(*) FROM episode_policies p JOIN updates u ON u.id = p.claimed_by"
        " WHERE u.state = 'running'"
    )
    async with engine.connect() as connection:
        return int(await connection.scalar(text(query)) or 0)


async def states(bench: Bench) -> list[tuple[str, int]]:
    return [(update.state, update.parent_version) for update in await bench.updates()]


async def test_next_update_is_planned_while_the_version_is_published(bench: Bench) -> None:
    async with bench.working() as loop:
        assert await Loop.update_once(loop, looks_ahead=True)
        assert await bench.states() == {0: "serving", 1: "written"}
        assert await held(bench.engine) == 4
        # It is not trained before its parent is loaded.
        assert not await Loop.update_once(loop, looks_ahead=True)
        assert loop.awaits_controller
        await loop.look()
        assert await held(bench.engine) == 4
        assert await loop.update_once()
    assert await states(bench) == [("done", 0), ("done", 1)]
    assert await bench.states() == {0: "retired", 1: "retired", 2: "serving"}
    await bench.assert_spent_once(8)


async def test_held_training_frees_the_planned_update_and_trains_nothing(bench: Bench) -> None:
    async with bench.working() as loop:
        assert await loop.update_once(looks_ahead=True)
        async with bench.engine.begin() as connection:
            serving = await bench.version(1)
            why: Any = {"reason": "rewards fell", "actor": "controller"}
            await hold_training(connection, serving, 0.5, **why)
        assert not await loop.update_once()
        assert await held(bench.engine) == 0
        async with bench.engine.begin() as connection:
            assert "rewards fell" in str(await training_warnings(connection, "m"))
            await resume_training(connection, "m", **why)
        assert await loop.update_once()
    assert (await bench.states())[2] == "serving"


async def test_update_planned_on_a_rejected_version_is_begun_again(bench: Bench) -> None:
    async with bench.working() as loop:
        bench.learner.served_off = -5.0
        assert await loop.update_once(looks_ahead=True)
        bench.learner.served_off = 0.0
        assert await loop.update_once()
    assert await states(bench) == [("done", 0), ("abandoned", 1), ("done", 0)]
    assert await bench.states() == {0: "retired", 1: "rejected", 2: "serving"}
    await bench.assert_spent_once(8)


@pytest.mark.parametrize("error", [LearnerError("the memory is full"), ValueError("a new fault")])
async def test_failed_plan_ahead_frees_its_episodes_and_keeps_the_version(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async with bench.working() as loop:
        plan = loop._training.plan

        async def fail(*arguments: Any) -> Any:
            if (await bench.updates())[0].state == "done":
                raise error
            return await plan(*arguments)

        monkeypatch.setattr(loop._training, "plan", fail)
        is_known = isinstance(error, LearnerError)
        with nullcontext() if is_known else pytest.raises(ValueError, match="a new fault"):
            assert await loop.update_once(looks_ahead=True)
        if not is_known:
            # As once the policy, which is left for a while, is taken up again.
            await loop.recover()
        assert await bench.states() == {0: "retired", 1: "serving"}
        assert await held(bench.engine) == 0
    assert await states(bench) == [("done", 0), ("abandoned", 1)]


async def test_episodes_too_old_after_publishing_are_not_claimed_ahead(
    bench: Bench,
) -> None:
    bench.change("claim", max_staleness=0, max_age_s=1e-6)
    async with bench.working() as loop:
        assert await loop.update_once(looks_ahead=True)
        assert await held(bench.engine) == 0
        assert not await loop.update_once()
    assert await states(bench) == [("done", 0), ("expired", 1)]


async def test_paused_trainer_holds_no_claimed_episodes(bench: Bench) -> None:
    async with bench.working() as loop:
        assert await loop.update_once(looks_ahead=True)
        loop._breaker.pause_until_test("a model server was away, and may be another one now")
        assert not await loop.update_once()
    assert await held(bench.engine) == 0


async def test_trainer_that_pauses_before_the_publication_holds_no_claimed_episodes(
    bench: Bench,
) -> None:
    async with bench.working() as loop:
        assert await Loop.update_once(loop, looks_ahead=True)
        loop._breaker.pause_until_test("a model server was away, and may be another one now")
        assert not await Loop.update_once(loop)
        assert await held(bench.engine) == 0
        await loop.look()
    assert await bench.states() == {0: "retired", 1: "serving"}


async def test_killed_trainer_spends_its_planned_episodes_once(bench: Bench) -> None:
    async with bench.working() as loop:
        assert await Loop.update_once(loop, looks_ahead=True)
    bench.restart()
    assert await bench.run_once()
    assert await states(bench) == [("done", 0), ("abandoned", 1), ("done", 1)]
    await bench.assert_spent_once(8)


async def test_planned_update_continues_the_moving_baselines(bare: Bench) -> None:
    bare.recipe = Recipe(
        claim=ClaimOptions(group_size=1, groups=4, max_age_s=1e9),
        credit=CreditOptions(normalisation="batch", air_lambda=0.0),
    )
    await bare.fill("t/a")
    await bare.fill("t/b")
    async with bare.working() as loop:
        assert await loop.update_once(looks_ahead=True)
        assert await loop.update_once()
    async with bare.engine.connect() as connection:
        query = text("SELECT baselines FROM updates ORDER BY claimed_at")
        left = list((await connection.execute(query)).scalars())
    families = [next(iter(baselines["families"].values())) for baselines in left]
    assert [agents[""]["count"] for agents in families] == [4, 8]


@pytest.mark.parametrize(("names", "ahead"), [(["writer"], 8), (["writer", "checker"], 0)])
async def test_episodes_are_claimed_ahead_for_a_single_policy_only_and_freed_at_the_stop(
    policies: Policies, monkeypatch: pytest.MonkeyPatch, names: list[str], ahead: int
) -> None:
    await policies.fill({"writer": 16})
    sync, waits = Loop.watch_servers, asyncio.Event()

    async def wait_at_the_second_turn(self: Loop) -> None:
        if await policies.updates():
            waits.set()
            await asyncio.Event().wait()
        await sync(self)

    monkeypatch.setattr(Loop, "watch_servers", wait_at_the_second_turn)
    async with policies.scheduler(names) as scheduler:
        work = asyncio.create_task(scheduler.run(0.01, once=False))
        await asyncio.wait_for(waits.wait(), 30.0)
        assert await held(policies.engine) == ahead
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
    assert await held(policies.engine) == 0
