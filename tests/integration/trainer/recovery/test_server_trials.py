"""Servers are tried before the first claim, and once they are back; a misfit costs nothing."""

import pytest

from benchmarks.stack import free_port
from tests.support.faults.killing import Killed
from tests.support.servers.fake_server import fake_model_server
from tests.support.trainer.pausing import (
    OWN,
    consumed,
    held_by_an_update,
    paused_for,
    states,
    try_again,
    working,
)
from tests.support.trainer.recovery import STEPS, Bench, bench, run_once
from trainer.errors import PublishError, ShortOfMemory, UpstreamAway
from trainer.publishing.model_server import Replicas

__all__ = ["bench"]


async def test_a_server_that_was_away_is_tried_before_the_next_claim(bench: Bench) -> None:
    async with working(bench) as loop:
        loop._breaker.doubt("the model servers were away")
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
            assert loop._breaker.why == "the memory has no room"
            assert paused_for() == ["out_of_memory"]
            assert not await try_again(loop)
        assert (await states(bench), await consumed(bench)) == ([], 0)
        assert await try_again(loop)
        assert paused_for() == []
    await bench.assert_spent_once(4)


async def test_what_a_killed_trainer_wrote_waits_until_the_servers_could_be_tried(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server with another base model would have it rejected, and its episodes lost."""
    with monkeypatch.context() as patched:
        STEPS["before publishing"](patched)
        with pytest.raises(Killed):
            await run_once(bench)

    def full(*_: object) -> None:
        raise ShortOfMemory("the memory has no room")

    bench.fake.logprobs["m"] = OWN
    async with Replicas([bench.fake.url]) as servers:
        loop = bench.loop(servers)
        with monkeypatch.context() as patched:
            patched.setattr(bench.learner, "write_trial", full)
            await loop.check_server()
            await loop.recover()
            assert (await bench.states())[1] == "written"
        loop._breaker._test_at = 0.0
        await loop.try_again()
    assert await bench.states() == {0: "published", 1: "serving"}


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
            assert "base model and the trainer's differ" in (loop._breaker.why or "")
            assert not await loop.update_once()
            assert (await consumed(bench), await held_by_an_update(bench)) == (4, 4)
            # It has the right one again.
            back.logprobs = {"m": OWN, "m@trial": OWN, "m@2": -3.0}
            assert await try_again(loop)
            assert set(back.loaded) == {"m@2"}
    assert await bench.states() == {0: "published", 1: "published", 2: "serving"}
