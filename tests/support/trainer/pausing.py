"""Let a trainer pause and try again, and read why it is paused and what it spent."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import get_args

from prometheus_client import REGISTRY
from sqlalchemy import select

from store import claims
from store.schema.tables import consumptions, episode_policies
from tests.support.trainer.recovery import Bench
from trainer.loop import Loop
from trainer.publishing.model_server import Replicas
from trainer.updates.circuit_breaker import PauseReason

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


def paused_for() -> list[str]:
    """Return why training is paused, as `/metrics` says."""
    found = {
        sample.labels["reason"]: sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == "pawl_trainer_paused" and sample.labels["policy"] == "m"
    }
    assert set(found) == set(get_args(PauseReason))
    return [reason for reason, value in found.items() if value]


async def try_again(loop: Loop) -> bool:
    """Do what the loop does once its pause is over."""
    loop._breaker._test_at = 0.0
    await loop.try_again()
    return await loop.update_once()
