"""Run one trainer of two policies on real tables, with scripted learners."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from store.records import SpoolRecord
from store.version_queries import list_versions
from tests.support.controller.publishing import PublishedLoop
from tests.support.ledger.episodes import ingest
from tests.support.records import call, reward, tokens
from tests.support.servers.fake_server import FakeModelServer
from tests.support.trainer.bench import OWN, FakeLearner
from trainer.publishing.model_server import Replicas
from trainer.recipes.recipe import ClaimOptions, PublishOptions, Recipe
from trainer.scheduler import PolicyScheduler, PolicyWorker
from trainer.settings import TrainerSettings
from trainer.updates.versions import apply_rules, begin_policy

# The policies, and how many groups an update of each takes.
GROUPS: Final = {"writer": 4, "checker": 1}
NAMES: Final = tuple(GROUPS)


class Policies:
    """Run trainers of the policies `writer` and `checker`."""

    def __init__(self, engine: AsyncEngine, server: FakeModelServer, folder: Path) -> None:
        self.engine = engine
        self.folder = folder
        self.fake = server
        server.logprobs["m"] = OWN
        self.learners = {name: FakeLearner(server, folder, name) for name in NAMES}
        self.together: Mapping[str, Sequence[str]] = {}
        self.wait_s = 1e9
        self.is_ready = asyncio.Event()

    async def fill(self, counts: Mapping[str, int], name: str = "t") -> None:
        """Store so many episodes for each policy, in groups of two."""
        records: list[SpoolRecord] = []
        for policy, count in counts.items():
            for number in range(count):
                key, made = f"{policy}-{name}{number}", tokens([1, 2, number], [4 + number % 2])
                task = f"{policy}-{name}{number // 2}"
                records.append(call(key, task=task, tokens=made, policy=policy, agent=policy))
                records.append(reward(float(number % 2), episode=key))
        async with self.engine.begin() as connection:
            await ingest(connection, records)

    def _worker(self, servers: Replicas, name: str) -> PolicyWorker:
        recipe = Recipe(
            claim=ClaimOptions(group_size=2, groups=GROUPS[name], max_age_s=1e9),
            publish=PublishOptions(control_share=0.0, wait_for_others_s=self.wait_s),
        )
        settings = TrainerSettings.model_validate({"adapter_dir": self.folder})

        async def begin(engine: AsyncEngine) -> PublishedLoop:
            together = self.together.get(name, ())
            await begin_policy(engine, name, "m", None)
            await apply_rules(engine, name, recipe, together)
            learner = self.learners[name]
            loop = PublishedLoop(
                settings, recipe, engine, servers, learner, name, together=together
            )
            await loop.recover()
            return loop

        return PolicyWorker(name, begin)

    @asynccontextmanager
    async def scheduler(self, names: Sequence[str] = NAMES) -> AsyncIterator[PolicyScheduler]:
        """Run a trainer of these policies, with a connection of its own."""
        async with self.engine.connect() as guard, Replicas([self.fake.url]) as servers:
            workers = [self._worker(servers, name) for name in names]
            try:
                yield PolicyScheduler(workers, guard, self.engine, self.is_ready)
            finally:
                # As at the end of a process: the holds go with the connection.
                await guard.invalidate()

    async def turns(self, count: int) -> list[str]:
        """Let one trainer make so many updates; return whose each was."""
        async with self.scheduler() as scheduler:
            for _ in range(count):
                await asyncio.wait_for(scheduler.run(0.01, once=True), 30)
        return await self.updates()

    async def turn(self, names: Sequence[str] = NAMES) -> None:
        """Let a trainer of these policies take one turn."""
        async with self.scheduler(names) as scheduler:
            await scheduler._run_turn(await scheduler._hold_workable())

    async def updates(self) -> list[str]:
        query = text("SELECT policy FROM updates WHERE state = 'done' ORDER BY claimed_at")
        async with self.engine.connect() as connection:
            return list((await connection.execute(query)).scalars())

    async def states(self) -> dict[str, str]:
        async with self.engine.connect() as connection:
            found = await list_versions(connection)
        return {f"{v.name}@{v.version}": v.state for v in found if v.version}

    async def serving(self) -> dict[str, int]:
        async with self.engine.connect() as connection:
            found = await list_versions(connection)
        return {v.name: v.version for v in found if v.state == "serving"}
