"""Run one trainer of two policies on real tables, with learners that only write versions."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from store.records import SpoolRecord
from store.version_queries import list_versions
from store.write.ingest import ingest
from tests.support.records import call, reward, tokens
from tests.support.servers.fake_server import FakeModelServer, fake_model_server
from trainer.batches import Row, bare_row
from trainer.loop import Loop
from trainer.publishing.model_server import Replicas
from trainer.publishing.publisher import Publisher
from trainer.recipes.recipe import ClaimOptions, PublishOptions, Recipe
from trainer.scheduler import PolicyScheduler, PolicyWorker
from trainer.settings import TrainerSettings
from trainer.updates.versions import begin_policy

NAMES = ("writer", "checker")
GROUPS = {"writer": 4, "checker": 1}


class FakeLearner:
    """Write versions that the server answers for; the real one is tested by itself."""

    def __init__(self, policy: str, server: FakeModelServer, folder: Path) -> None:
        self.policy = policy
        self._server = server
        self._versions = folder.resolve() / policy
        self.fails: Exception | None = None
        # What the server serves this one's versions with; the trainer's own is -2.
        self.served = -2.0

    def interrupt(self) -> None:
        return

    def restore(self, adapter: Path | None) -> None:
        if self.fails:
            raise self.fails

    def update(self, rows: Any, step_share: float = 1.0) -> dict[str, Any]:
        return {"loss": 0.5, "rows": len(rows)}

    def save(self, folder: Path) -> None:
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_bytes(self.policy.encode())

    def misfit(self, adapter: Path) -> str | None:
        return None

    def why_unreplayable(self, distribution: Any, sampled_ids: Any) -> str | None:
        return None

    def version_logprobs(self, adapter: Path | None, rows: Any) -> list[list[float]]:
        return [[-0.5] * len(row.sampled_ids) for row in rows]

    def saved_as(self, adapter: Path) -> None:
        return

    def probe_rows(self) -> list[Row]:
        return [bare_row(0, [1, 2, 3], [4, 5])]

    def logprobs(self, rows: Any) -> list[list[float]]:
        """Give every token -2 - N by version N, here and (if it is healthy) on the server."""
        version = 1 + len(list(self._versions.glob("[0-9]*")))
        self._server.logprobs[f"{self.policy}@{version}"] = self.served - version
        return [[-2.0 - version] * len(row.sampled_ids) for row in rows]


class Bench:
    """Run a trainer of two policies on real tables."""

    def __init__(self, engine: AsyncEngine, server: FakeModelServer, folder: Path) -> None:
        self.engine = engine
        self.folder = folder
        self.fake = server
        self.learners = {name: FakeLearner(name, server, folder) for name in NAMES}
        self.together: Mapping[str, Sequence[str]] = {}
        self.wait_s = 1e9

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

    def workers(self, servers: Replicas, names: Sequence[str] = NAMES) -> list[PolicyWorker]:
        return [self._worker(servers, name) for name in names]

    def _worker(self, servers: Replicas, name: str) -> PolicyWorker:
        recipe = Recipe(
            claim=ClaimOptions(group_size=2, groups=GROUPS[name], max_age_s=1e9),
            publish=PublishOptions(retire_after_s=1e9, wait_for_others_s=self.wait_s),
        )
        settings = TrainerSettings.model_validate({"adapter_dir": self.folder})

        async def begin(engine: AsyncEngine) -> Loop:
            await begin_policy(engine, name, "m", None)
            together = self.together.get(name, ())
            publisher = Publisher(engine, servers, name, recipe.publish, together)
            loop = Loop(settings, recipe, engine, publisher, self.learners[name], name)
            await loop.recover()
            return loop

        return PolicyWorker(name, begin)

    @asynccontextmanager
    async def rounds(self, names: Sequence[str] = NAMES) -> AsyncIterator[PolicyScheduler]:
        """Run a trainer of these policies, with a connection of its own."""
        async with self.engine.connect() as guard, Replicas([self.fake.url]) as servers:
            try:
                yield PolicyScheduler(self.workers(servers, names), guard, self.engine)
            finally:
                # As at the end of a process: the holds go with the connection.
                await guard.invalidate()

    async def turns(self, count: int) -> list[str]:
        """Let one trainer make so many updates; return whose each was."""
        async with self.rounds() as rounds:
            for _ in range(count):
                await asyncio.wait_for(rounds.run(0.01, once=True), 30)
        return await self.updates()

    async def look(self, names: Sequence[str] = NAMES) -> None:
        """Let a trainer of these policies look around, and make an update of what is there."""
        async with self.rounds(names) as rounds:
            await rounds._turn(await rounds._take_up())

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


@pytest.fixture
async def bench(engine: AsyncEngine, tmp_path: Path) -> AsyncIterator[Bench]:
    async with fake_model_server() as server:
        yield Bench(engine, server, tmp_path)
