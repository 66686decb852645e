"""An update on several replicas: it goes live on all that answer, and waits while none does."""

import pytest

from benchmarks.stack import free_port
from tests.support.servers.fake_server import fake_model_server
from tests.support.trainer.recovery import Bench, bench, run_once
from trainer.errors import UpstreamAway
from trainer.publishing.model_server import Replicas

__all__ = ["bench"]


async def test_an_update_goes_live_on_every_replica(bench: Bench) -> None:
    async with fake_model_server() as other:
        other.logprobs = bench.fake.logprobs
        async with Replicas([bench.fake.url, other.url]) as servers:
            loop = bench.loop(servers)
            await loop.recover()
            assert await loop.update_once()
            assert bench.fake.loads == other.loads == ["m@1"]
            # One was restarted: it alone loads again.
            other.loaded.clear()
            await loop.sync_adapters()
            assert (bench.fake.loads, other.loads) == (["m@1"], ["m@1", "m@1"])


async def test_while_a_replica_is_away_training_and_publishing_go_on(bench: Bench) -> None:
    away = f"http://127.0.0.1:{free_port()}/v1"
    async with Replicas([away, bench.fake.url]) as servers:
        loop = bench.loop(servers)
        await loop.recover()
        await loop.sync_adapters()
        assert await loop.update_once()
        assert await bench.states() == {0: "published", 1: "serving"}
        await bench.fill("u")
        await loop.sync_adapters()
        assert await loop.update_once()
    assert await bench.states() == {0: "published", 1: "published", 2: "serving"}
    assert bench.fake.loads == ["m@1", "m@2"]


async def test_a_replica_that_is_back_has_what_a_probe_compares_with(bench: Bench) -> None:
    async with fake_model_server() as other:
        other.logprobs = bench.fake.logprobs
        async with Replicas([bench.fake.url, other.url]) as servers:
            loop = bench.loop(servers)
            await loop.recover()
            assert await loop.update_once()
            await bench.fill("u")
            # It was restarted after the last sync, in the middle of an update.
            other.loaded.clear()
            assert await loop.update_once()
        assert (await bench.states())[2] == "serving"
        assert set(other.loaded) == {"m@1", "m@2"}


async def test_a_server_whose_engine_died_rejects_no_version(bench: Bench) -> None:
    bench.fake.engine_is_dead = True
    with pytest.raises(UpstreamAway):
        await run_once(bench)
    assert (await bench.states())[1] == "written"
    bench.fake.engine_is_dead = False
    await run_once(bench)
    assert await bench.states() == {0: "published", 1: "serving"}


async def test_a_server_restarted_between_load_and_probe_rejects_no_version(bench: Bench) -> None:
    bench.fake.forgets = {"m@1"}
    with pytest.raises(UpstreamAway):
        await run_once(bench)
    assert (await bench.states())[1] == "written"
    await run_once(bench)
    assert await bench.states() == {0: "published", 1: "serving"}


async def test_with_every_replica_away_a_version_waits(bench: Bench) -> None:
    ports = [free_port(), free_port()]
    async with Replicas([f"http://127.0.0.1:{port}/v1" for port in ports]) as servers:
        loop = bench.loop(servers)
        await loop.recover()
        with pytest.raises(UpstreamAway):
            await loop.update_once()
    assert (await bench.states())[1] == "written"
    await bench.assert_spent_once(4)
    async with Replicas([bench.fake.url]) as servers:
        await bench.loop(servers).recover()
    assert (await bench.states())[1] == "serving"


async def test_a_version_that_one_replica_serves_wrongly_is_taken_from_all(bench: Bench) -> None:
    async with fake_model_server() as other:
        other.logprobs["m@1"] = -9.0
        async with Replicas([bench.fake.url, other.url]) as servers:
            loop = bench.loop(servers)
            await loop.recover()
            await loop.update_once()
    assert (await bench.states())[1] == "rejected"
    assert not bench.fake.loaded
    assert not other.loaded
