"""What a replica serves otherwise than it was trained is not left there, and is told."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.steward.rollback import RollbackTarget, load_again
from store.version_queries import list_servable
from tests.support.servers.fake_server import FakeModelServer, fake_model_server
from tests.support.steward.replicas import (
    POLL_S,
    RunningSteward,
    asked,
    assert_has,
    publish,
    stewarding,
)
from tests.support.waiting import until
from trainer.publishing.model_server import Replicas
from trainer.publishing.probe import ProbeRow

# What version 1 was trained to say, and what a server says that has another base model.
TRAINED, OTHER = -2.0, -4.0
PROBE = (ProbeRow(ids=(1, 2, 3), logprobs=(TRAINED, TRAINED)),)


@pytest.fixture
async def server() -> AsyncIterator[FakeModelServer]:
    async with fake_model_server() as made:
        made.logprobs["m@1"] = TRAINED
        yield made


async def told(steward: RunningSteward, server: FakeModelServer) -> str:
    """What is said of version 1 on a server, once it is."""
    await until(lambda: "m@1" in steward.misserved.get(server.url, {}))
    async with asked(steward) as (ready, metrics):
        assert ready["status"] == "degraded"
        assert f'misserved_adapters{{replica="{server.url}",version="m@1"}} 1.0' in metrics
        assert f'outcome="misserved",replica="{server.url}"' in metrics
        return str(ready["misserved"][server.url]["m@1"])


async def test_a_replica_restarted_with_another_base_is_refused_and_reported(
    database_url: str, engine: AsyncEngine, server: FakeModelServer, tmp_path: Path
) -> None:
    await publish(engine, tmp_path, 1, probe=PROBE)
    async with fake_model_server() as other:
        other.logprobs["m@1"] = TRAINED
        async with stewarding(database_url, server.url, other.url) as steward:
            await assert_has(server, "m@1")
            await assert_has(other, "m@1")
            # It was restarted: it has lost its adapters, and has other weights.
            other.logprobs["m@1"] = OTHER
            other.loaded.clear()
            assert "differ from the trainer's by 2.0000 nats" in await told(steward, other)
            await assert_has(other)
            # The other replica keeps it, and it is not tried there at each look.
            await asyncio.sleep(10 * POLL_S)
            assert set(server.loaded) == {"m@1"}
            assert other.loads.count("m@1") <= 3
            # Once it serves the right model it has the version again, and nothing is told of it.
            other.logprobs["m@1"] = TRAINED
            await assert_has(other, "m@1")
            await until(lambda: not steward.misserved)
            async with asked(steward) as (ready, metrics):
                assert (ready["status"], ready["misserved"]) == ("ready", {})
                assert "pawl_steward_misserved_adapters{" not in metrics


async def test_an_adapter_that_a_restarted_server_does_not_apply_is_refused(
    database_url: str, engine: AsyncEngine, server: FakeModelServer, tmp_path: Path
) -> None:
    """It answers as its base model does, which the trained version is near to."""
    near = (ProbeRow(ids=(1, 2, 3), logprobs=(-1.01, -1.01)),)
    server.logprobs = {"m": -1.0, "m@1": -1.0}
    await publish(engine, tmp_path, 1, probe=near)
    async with stewarding(database_url, server.url) as steward:
        assert "it did not load the adapter" in await told(steward, server)
        await assert_has(server)


async def test_what_was_loaded_before_the_steward_came_is_checked_too(
    database_url: str, engine: AsyncEngine, server: FakeModelServer, tmp_path: Path
) -> None:
    """Whoever loaded it may have been killed before it could ask what is served."""
    await publish(engine, tmp_path, 1, probe=PROBE)
    server.loaded = {"m@1": str(tmp_path / "m" / "1")}
    server.logprobs["m@1"] = OTHER
    async with stewarding(database_url, server.url) as steward:
        await told(steward, server)
        await assert_has(server)


async def test_what_nobody_could_ask_about_is_not_left_loaded(
    database_url: str, engine: AsyncEngine, server: FakeModelServer, tmp_path: Path
) -> None:
    await publish(engine, tmp_path, 1, probe=PROBE)
    server.cannot_answer = {"m@1"}
    async with stewarding(database_url, server.url) as steward:
        assert "refused a probe of m@1" in await told(steward, server)
        await assert_has(server)
        server.cannot_answer = set()
        await assert_has(server, "m@1")


async def test_what_is_misserved_does_not_serve_again_after_a_roll_back(
    engine: AsyncEngine, server: FakeModelServer, tmp_path: Path
) -> None:
    await publish(engine, tmp_path, 1, probe=PROBE)
    server.logprobs["m@1"] = OTHER
    async with engine.connect() as connection:
        base, version = await list_servable(connection, "m")
    async with Replicas([server.url]) as replicas:
        loaded = await load_again(replicas, RollbackTarget(version=version, base=base))
    assert loaded.refused
    assert loaded.why_not is not None
    assert "differ from the trainer's" in loaded.why_not
    assert not server.loaded
