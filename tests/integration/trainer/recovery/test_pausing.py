"""A fault of the machine, the server or the recipe costs two updates at most, and then nothing."""

from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import select

from store.schema.tables import episodes
from tests.support.trainer.bench import Bench, paused_for, try_again
from trainer.batches import Row
from trainer.errors import DriftOutOfBounds, LearnerError, OtherVocabulary, Unusable


async def test_failing_learner_spends_nothing_and_training_resumes_after_repair(
    bench: Bench,
) -> None:
    async with bench.working() as loop:
        bench.learner.fails = LearnerError("the GPU is full")
        assert not await loop.update_once()
        assert [one.state for one in await bench.updates()] == ["abandoned"] * 2
        assert (await bench.consumed(), await bench.claimed()) == (0, 0)
        assert not await loop.update_once()
        assert not await try_again(loop)
        # It was tried with made-up rows, without a claim.
        assert [one.state for one in await bench.updates()] == ["abandoned"] * 2
        assert (loop._breaker.why, paused_for()) == ("the GPU is full", ["failed"])
        bench.learner.fails = None
        assert await try_again(loop)
        assert not paused_for()
    assert await bench.states() == {0: "retired", 1: "serving"}
    await bench.assert_spent_once(4)


async def test_training_pauses_after_two_rejected_versions(bench: Bench) -> None:
    bench.fake.refuse_load = True
    for name in ("u", "v"):
        await bench.fill(name)
    async with bench.working() as loop:
        for _ in range(4):
            await loop.update_once()
        assert await bench.states() == {0: "serving", 1: "rejected", 2: "rejected"}
        assert await bench.consumed() == 8
        assert not await try_again(loop)
        assert "--max-lora-rank" in (loop._breaker.why or "")
        assert paused_for() == ["rejected"]
        bench.fake.refuse_load = False
        assert await try_again(loop)
    assert (await bench.states())[3] == "serving"
    await bench.assert_spent_once(12)


async def test_drift_with_a_faulty_server_pauses_training_with_the_reason(bench: Bench) -> None:
    async with bench.working() as loop:
        bench.fake.sampled_logprob, bench.learner.drifts = -4.0, True
        for name in "uvw":
            await loop.update_once()
            await bench.fill(name)
        assert await bench.consumed() == 2
        assert "processed_logprobs" in (loop._breaker.why or "")
        assert paused_for() == ["server"]


async def test_drift_of_episodes_before_a_repair_does_not_pause_training(bench: Bench) -> None:
    async with bench.working() as loop:
        bench.learner.drifts = True
        for name in "uv":
            await loop.update_once()
            assert not loop._breaker.is_open
            await bench.fill(name)
        assert await bench.consumed() >= 2
        bench.learner.drifts = False
        assert await loop.update_once()
    assert (await bench.states())[1] == "serving"


async def wrong_ones(bench: Bench) -> set[UUID]:
    """The episodes whose names say that a server at fault sampled them."""
    query = select(episodes.c.id).where(episodes.c.key.startswith("wrong"))
    async with bench.engine.connect() as connection:
        return set((await connection.execute(query)).scalars())


Find = Callable[[dict[UUID, str]], LearnerError]
# How the real learner tells rows that a server at fault sampled.
FINDS: dict[str, Find] = {
    "drift": lambda odd: DriftOutOfBounds("server and trainer differ", odd, {}),
    "vocabulary": lambda odd: OtherVocabulary("ids of another vocabulary", odd),
}


async def learn_to_see(bench: Bench, monkeypatch: pytest.MonkeyPatch, find: Find) -> None:
    """Let the learner find rows that a server sampled wrongly."""
    real, wrong = bench.learner.update, await wrong_ones(bench)

    def update(rows: Sequence[Row], step_share: float = 1.0) -> dict[str, Any]:
        odd = {row.episode_id: "far" for row in rows if row.episode_id in wrong}
        if odd:
            raise find(odd)
        return real(rows, step_share)

    monkeypatch.setattr(bench.learner, "update", update)


@pytest.mark.parametrize("found_by", FINDS)
async def test_episodes_sampled_by_a_faulty_model_server_are_set_aside_and_not_spent(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, found_by: str
) -> None:
    """However many episodes there are, two updates' are spent, and what is good is learned from."""
    async with bench.working() as loop:
        assert await loop.update_once()
        bench.fake.sampled_logprob = -4.0
        for number in range(12):
            await bench.fill(f"wrong{number}-")
        await learn_to_see(bench, monkeypatch, FINDS[found_by])
        for _ in range(3):
            assert not await loop.update_once()
        assert loop._breaker.is_open
        assert await bench.consumed() == 4 + 8
        bench.fake.sampled_logprob = None
        assert not await try_again(loop)
        await bench.fill("right")
        assert await loop.update_once()
        assert await loop.waiting_updates() == 0
    async with bench.working() as loop:
        # A trainer that was started again knows it, too.
        assert not await loop.update_once()
        await bench.fill("later")
        assert await loop.update_once()
    assert (await bench.states())[3] == "serving"
    assert await bench.consumed() == 4 + 8 + 8
    await bench.assert_spent_once(20)


@pytest.mark.parametrize("found_by", FINDS)
async def test_server_fault_repaired_before_its_detection_spends_two_updates_of_episodes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, found_by: str
) -> None:
    async with bench.working() as loop:
        assert await loop.update_once()
        for number in range(12):
            await bench.fill(f"wrong{number}-")
        await learn_to_see(bench, monkeypatch, FINDS[found_by])
        assert not await loop.update_once()
        assert not loop._breaker.is_open
        assert await bench.consumed() == 4 + 8
        await bench.fill("right")
        assert await loop.update_once()
    await bench.assert_spent_once(4 + 8 + 4)


def blame_all(rows: Sequence[Row], step_share: float = 1.0) -> dict[str, Any]:
    raise Unusable("none fits", {row.episode_id: "it is long" for row in rows}, "too_long")


async def test_failure_of_most_episodes_is_blamed_on_the_system(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where so little memory is left that only the shortest row has room."""
    async with bench.working() as loop:
        for number in range(6):
            await bench.fill(f"more{number}-")
        with monkeypatch.context() as patched:
            patched.setattr(bench.learner, "update", blame_all)
            for _ in range(4):
                assert not await loop.update_once()
            assert loop._breaker.why == "none fits"
            assert await bench.consumed() == 8
        assert await try_again(loop)
        assert not paused_for()
    assert (await bench.states())[1] == "serving"


async def test_few_blamed_episodes_do_not_pause_training(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, spent = bench.learner.update, 0

    def update(rows: Sequence[Row], step_share: float = 1.0) -> dict[str, Any]:
        nonlocal spent
        if spent < 5:
            spent += 1
            raise Unusable("one does not fit", {rows[0].episode_id: "it is long"}, "too_long")
        return real(rows, step_share)

    async with bench.working() as loop:
        for number in range(6):
            await bench.fill(f"more{number}-")
        monkeypatch.setattr(bench.learner, "update", update)
        assert await loop.update_once()
        assert not loop._breaker.is_open
        assert await bench.consumed() == 5 + 4
