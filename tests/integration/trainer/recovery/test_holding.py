"""A fault of the machine, the server or the recipe costs two updates at most, and then nothing."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, get_args
from uuid import UUID

import pytest
from prometheus_client import REGISTRY
from sqlalchemy import select

from store.schema.claimable import episode_policies
from store.schema.recorded import episodes
from store.schema.trained import consumptions
from store.updates import claims
from tests.integration.conftest import free_port
from tests.integration.trainer.recovery.test_recovery import Bench, bench
from tests.support.servers.fake_server import fake_model_server
from trainer.batches.rows import Row
from trainer.errors import (
    DriftOutOfBounds,
    LearnerError,
    OtherVocabulary,
    PublishError,
    ShortOfMemory,
    Unusable,
    UpstreamAway,
)
from trainer.loop import Loop
from trainer.publishing.replicas import Replicas
from trainer.updates.holding import HoldReason

__all__ = ["bench"]

# What the scripted learner says of any row, and so a server that fits.
OWN = -0.5


@asynccontextmanager
async def working(bench: Bench) -> AsyncIterator[Loop]:
    bench.fake.logprobs["m"] = OWN
    async with Replicas([bench.fake.url]) as servers:
        loop = bench.loop(servers)
        await loop.recover()
        yield loop


async def consumed(bench: Bench) -> int:
    async with bench.engine.connect() as connection:
        return len((await connection.execute(select(consumptions.c.episode_id))).all())


async def held_by_an_update(bench: Bench) -> int:
    query = select(episode_policies.c.episode_id).where(episode_policies.c.claimed_by.is_not(None))
    async with bench.engine.connect() as connection:
        return len((await connection.execute(query)).all())


async def states(bench: Bench) -> list[str]:
    async with bench.engine.connect() as connection:
        return [one.state for one in await claims.list_updates(connection, "m")]


def gauge() -> float | None:
    return REGISTRY.get_sample_value("pawl_trainer_held", {"policy": "m"})


def held_for() -> list[str]:
    """What `/metrics` says that the trainer holds for."""
    found = {
        sample.labels["reason"]: sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == "pawl_trainer_held_reason" and sample.labels["policy"] == "m"
    }
    assert set(found) == set(get_args(HoldReason))
    return [reason for reason, value in found.items() if value]


async def try_again(loop: Loop) -> bool:
    """What the loop does once its pause is over."""
    loop._holding._trial_at = 0.0
    await loop.try_again()
    return await loop.update_once()


async def test_a_learner_that_fails_spends_nothing_and_goes_on_once_repaired(bench: Bench) -> None:
    async with working(bench) as loop:
        bench.learner.fails = LearnerError("the GPU is full")
        assert not await loop.update_once()
        assert await states(bench) == ["abandoned"] * 2
        assert (await consumed(bench), await held_by_an_update(bench)) == (0, 0)
        assert not await loop.update_once()
        assert not await try_again(loop)
        # It was tried with made-up rows, without a claim.
        assert await states(bench) == ["abandoned"] * 2
        assert (loop._holding.reason, gauge(), held_for()) == ("the GPU is full", 1.0, ["failed"])
        bench.learner.fails = None
        assert await try_again(loop)
        assert gauge() == 0.0
    assert await bench.states() == {0: "published", 1: "serving"}
    await bench.assert_spent_once(4)


async def test_versions_that_are_rejected_stop_costing_episodes_after_two(bench: Bench) -> None:
    bench.fake.refuse_load = True
    for name in ("u", "v"):
        await bench.fill(name)
    async with working(bench) as loop:
        for _ in range(4):
            await loop.update_once()
        assert await bench.states() == {0: "serving", 1: "rejected", 2: "rejected"}
        assert await consumed(bench) == 8
        assert not await try_again(loop)
        assert "--max-lora-rank" in (loop._holding.reason or "")
        assert held_for() == ["rejected"]
        bench.fake.refuse_load = False
        assert await try_again(loop)
    assert (await bench.states())[3] == "serving"
    await bench.assert_spent_once(12)


async def test_drift_while_the_server_is_wrong_holds_and_is_named(bench: Bench) -> None:
    async with working(bench) as loop:
        bench.fake.sampled_logprob, bench.learner.drifts = -4.0, True
        for name in "uvw":
            await loop.update_once()
            await bench.fill(name)
        assert await consumed(bench) == 2
        assert "processed_logprobs" in (loop._holding.reason or "")
        assert held_for() == ["server"]


async def test_drift_of_what_was_sampled_before_a_repair_does_not_hold(bench: Bench) -> None:
    async with working(bench) as loop:
        bench.learner.drifts = True
        for name in "uv":
            await loop.update_once()
            assert not loop._holding.is_held
            await bench.fill(name)
        assert await consumed(bench) >= 2
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
async def test_what_agents_do_under_a_fault_is_set_aside_and_not_spent(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, found_by: str
) -> None:
    """However many episodes there are, two updates' are spent, and what is good is learned from."""
    async with working(bench) as loop:
        assert await loop.update_once()
        bench.fake.sampled_logprob = -4.0
        for number in range(12):
            await bench.fill(f"wrong{number}-")
        await learn_to_see(bench, monkeypatch, FINDS[found_by])
        for _ in range(3):
            assert not await loop.update_once()
        assert loop._holding.is_held
        assert await consumed(bench) == 4 + 8
        bench.fake.sampled_logprob = None
        assert not await try_again(loop)
        await bench.fill("right")
        assert await loop.update_once()
        assert await loop.waiting_updates() == 0
    async with working(bench) as loop:
        # A trainer that was started again knows it, too.
        assert not await loop.update_once()
        await bench.fill("later")
        assert await loop.update_once()
    assert (await bench.states())[3] == "serving"
    assert await consumed(bench) == 4 + 8 + 8
    await bench.assert_spent_once(20)


@pytest.mark.parametrize("found_by", FINDS)
async def test_a_fault_that_was_repaired_before_it_was_known_costs_two_updates(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, found_by: str
) -> None:
    async with working(bench) as loop:
        assert await loop.update_once()
        for number in range(12):
            await bench.fill(f"wrong{number}-")
        await learn_to_see(bench, monkeypatch, FINDS[found_by])
        assert not await loop.update_once()
        assert not loop._holding.is_held
        assert await consumed(bench) == 4 + 8
        await bench.fill("right")
        assert await loop.update_once()
    await bench.assert_spent_once(4 + 8 + 4)


def blame_all(rows: Sequence[Row], step_share: float = 1.0) -> dict[str, Any]:
    raise Unusable("none fits", {row.episode_id: "it is long" for row in rows}, "too_long")


async def test_what_would_be_the_fault_of_most_episodes_is_not_theirs(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where so little memory is left that only the shortest row has room."""
    async with working(bench) as loop:
        for number in range(6):
            await bench.fill(f"more{number}-")
        with monkeypatch.context() as patched:
            patched.setattr(bench.learner, "update", blame_all)
            for _ in range(4):
                assert not await loop.update_once()
            assert (loop._holding.reason, gauge()) == ("none fits", 1.0)
            assert await consumed(bench) == 8
        assert await try_again(loop)
        assert gauge() == 0.0
    assert (await bench.states())[1] == "serving"


async def test_a_few_episodes_that_are_to_blame_do_not_hold(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, spent = bench.learner.update, 0

    def update(rows: Sequence[Row], step_share: float = 1.0) -> dict[str, Any]:
        nonlocal spent
        if spent < 5:
            spent += 1
            raise Unusable("one does not fit", {rows[0].episode_id: "it is long"}, "too_long")
        return real(rows, step_share)

    async with working(bench) as loop:
        for number in range(6):
            await bench.fill(f"more{number}-")
        monkeypatch.setattr(bench.learner, "update", update)
        assert await loop.update_once()
        assert not loop._holding.is_held
        assert await consumed(bench) == 5 + 4


async def test_a_server_that_was_away_is_tried_before_the_next_claim(bench: Bench) -> None:
    async with working(bench) as loop:
        loop._holding.doubt("the model servers were away")
        bench.fake.sampled_logprob = -4.0
        await loop.try_again()
        assert not await loop.update_once()
        assert (await states(bench), await consumed(bench)) == ([], 0)
        bench.fake.sampled_logprob = None
        assert await try_again(loop)
    await bench.assert_spent_once(4)


async def test_too_little_memory_at_the_start_is_waited_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise ShortOfMemory("the memory has no room")

    async with working(bench) as loop:
        with monkeypatch.context() as patched:
            patched.setattr(bench.learner, "write_trial", full)
            await loop.check_server()
            assert (loop._holding.reason, gauge()) == ("the memory has no room", 1.0)
            assert held_for() == ["out_of_memory"]
            assert not await try_again(loop)
        assert (await states(bench), await consumed(bench)) == ([], 0)
        assert await try_again(loop)
        assert (gauge(), held_for()) == (0.0, [])
    await bench.assert_spent_once(4)


async def test_what_a_server_samples_with_by_default_is_not_in_the_trial(bench: Bench) -> None:
    async with working(bench) as loop:
        await loop.check_server()
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert bench.fake.sampled_with is not None
    assert bench.fake.sampled_with.items() >= neutral.items()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("refuses", "--max-lora-rank"),
        ("another base", "PAWL_MODEL"),
        ("another adapter", "LoRA in the layers"),
        ("raw", "--logprobs-mode processed_logprobs"),
    ],
)
async def test_what_does_not_fit_is_known_before_the_first_claim(
    bench: Bench, fault: str, said: str
) -> None:
    async with working(bench) as loop:
        await loop.check_server()
        if fault == "refuses":
            bench.fake.refuse_load = True
        elif fault == "another base":
            bench.fake.logprobs["m"] = -4.0
        elif fault == "another adapter":
            bench.learner.trial_logprob = -4.0
        else:
            bench.fake.sampled_logprob = -4.0
        with pytest.raises(PublishError, match=said):
            await loop.check_server()
    assert bench.fake.loaded == {}
    assert not list(bench.folder.glob("m/*"))
    assert await states(bench) == []


async def test_a_server_that_is_away_does_not_stop_the_check_of_the_others(bench: Bench) -> None:
    bench.fake.logprobs["m"] = OWN
    nobody = "http://127.0.0.1:9/v1"
    for urls, away in (([nobody, bench.fake.url], False), ([nobody], True)):
        async with Replicas(urls) as servers:
            loop = bench.loop(servers)
            if away:
                with pytest.raises(UpstreamAway):
                    await loop.check_server()
            else:
                await loop.check_server()


async def test_a_replica_that_is_back_with_another_base_stops_training_before_it_costs_anything(
    bench: Bench,
) -> None:
    bench.fake.logprobs["m"] = OWN
    port = free_port()
    async with Replicas([bench.fake.url, f"http://127.0.0.1:{port}/v1"]) as servers:
        loop = bench.loop(servers)
        await loop.recover()
        await loop.sync_adapters()
        assert await loop.update_once()
        await bench.fill("u")
        async with fake_model_server(port) as back:
            back.logprobs = {"m": -4.0, "m@1": -4.0}
            await loop.sync_adapters()
            assert not back.loaded
            assert not await loop.update_once()
            await loop.try_again()
            assert "base model and the trainer's differ" in (loop._holding.reason or "")
            assert not await loop.update_once()
            assert (await consumed(bench), await held_by_an_update(bench)) == (4, 4)
            # It has the right one again.
            back.logprobs = {"m": OWN, "m@trial": OWN, "m@2": -3.0}
            assert await try_again(loop)
            assert set(back.loaded) == {"m@2"}
    assert await bench.states() == {0: "published", 1: "published", 2: "serving"}
