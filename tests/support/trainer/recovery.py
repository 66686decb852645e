"""Run a trainer's loop on real tables, with a learner that only takes its steps."""

import errno
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from store import claims, version_states
from store.read.stats import totals
from store.records import SpoolRecord
from store.version_queries import list_versions
from store.version_states import ensure_base
from store.write.ingest import ingest
from tests.support.faults.killing import killing
from tests.support.records import call, reward, tokens
from tests.support.servers.fake_server import FakeModelServer, fake_model_server
from trainer.batches import Row, bare_row
from trainer.errors import DriftOutOfBounds, Interrupted, LearnerError
from trainer.loop import Loop
from trainer.publishing import adapters
from trainer.publishing.adapters import write_base
from trainer.publishing.model_server import ModelServer, Replicas
from trainer.publishing.publisher import Publisher
from trainer.recipes.recipe import (
    ClaimOptions,
    GateOptions,
    OptimizerOptions,
    PublishOptions,
    Recipe,
)
from trainer.settings import TrainerSettings


class FakeLearner:
    """Count what it trains on. The real one is tested by itself; here only the steps matter."""

    def __init__(self, server: FakeModelServer, folder: Path) -> None:
        self._server = server
        self._versions = folder / "m"
        self.updates = 0
        self.restored: Path | None = None
        # What computed missing log-probabilities, and of how many rows.
        self.asked: list[tuple[Path | None, int]] = []
        self.fails: LearnerError | None = None
        # Set: the first row of each update was sampled from another model.
        self.drifts = False
        self.interrupted = threading.Event()
        # Set: an update goes on until it is interrupted.
        self.slow = False
        self.full_disk = 0
        # How far from the base model each update ends, if it tells.
        self.kl_to_base: float | None = None
        # Adapters that were written to be tried, and what the server makes of them.
        self.trials = 0
        self.trial_logprob = -0.5
        # Set once it does what a test waits for.
        self.begun = threading.Event()

    def interrupt(self) -> None:
        self.interrupted.set()

    def restore(self, adapter: Path | None) -> None:
        self.restored = adapter

    def update(self, rows: Any, step_share: float = 1.0) -> dict[str, Any]:
        if self.fails:
            raise self.fails
        if self.drifts:
            odd = {rows[0].episode_id: "by 0.3"}
            raise DriftOutOfBounds("server and trainer differ", odd, {})
        if self.slow:
            self.begun.set()
            assert self.interrupted.wait(10.0)
            raise Interrupted("stopped")
        self.updates += 1
        told = {} if self.kl_to_base is None else {"kl_to_base": self.kl_to_base}
        return {"loss": 0.5, "rows": len(rows), **told}

    def save(self, folder: Path) -> None:
        if self.full_disk:
            self.full_disk -= 1
            self.begun.set()
            (folder / "half").write_bytes(b"weig")
            raise OSError(errno.ENOSPC, "No space left on device")
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_bytes(b"weights")
        write_base(folder, f"base of {len(list(self._versions.glob('[0-9]*')))}")

    def misfit(self, adapter: Path) -> str | None:
        return None

    def write_trial(self, folder: Path, effect: float) -> list[Row]:
        self.trials += 1
        self._server.logprobs[f"m@{folder.name}"] = self.trial_logprob
        return [bare_row(0, [1, 2, 3], [4, 5])]

    def probe_rows(self) -> list[Row]:
        return [bare_row(0, [1, 2, 3], [4, 5])]

    def rehearse(self) -> None:
        if self.fails:
            raise self.fails

    def why_unreplayable(self, distribution: Any, sampled_ids: Any) -> str | None:
        return None

    def version_logprobs(self, adapter: Path | None, rows: Any) -> list[list[float]]:
        if not all(row.sampled_logprobs for row in rows):
            self.asked.append((adapter, len(rows)))
        return [[-0.5] * len(row.sampled_ids) for row in rows]

    def saved_as(self, adapter: Path) -> None:
        assert adapter.parent == self._versions

    def logprobs(self, rows: Any) -> list[list[float]]:
        """Give every token −1 − N by version N, here and on the server."""
        version = 1 + max((int(one.name) for one in self._versions.glob("[0-9]*")), default=0)
        value = -1.0 - version
        self._server.logprobs.setdefault(f"m@{version}", value)
        return [[value] * len(row.sampled_ids) for row in rows]


class Bench:
    """Run a loop on real tables with two claimable groups."""

    def __init__(self, engine: AsyncEngine, server: FakeModelServer, folder: Path) -> None:
        self.engine = engine
        self.fake = server
        self.folder = folder
        self.learner = FakeLearner(server, folder.resolve())
        self.optimizer = OptimizerOptions()
        self.gate = GateOptions()

    async def fill(self, name: str = "t") -> None:
        records: list[SpoolRecord] = []
        for task in range(2):
            for member in range(2):
                episode = f"{name}{task}-{member}"
                made = tokens([1, 2, task], [4 + member])
                records.append(call(episode, task=f"{name}{task}", tokens=made))
                records.append(reward(float(member), episode=episode))
        async with self.engine.begin() as connection:
            await ensure_base(connection, "m")
            await ingest(connection, records)

    def loop(self, server: Replicas) -> Loop:
        recipe = Recipe(
            claim=ClaimOptions(group_size=2, groups=2, max_age_s=1e9),
            publish=PublishOptions(retire_after_s=1e9),
            optimizer=self.optimizer,
            gate=self.gate,
        )
        publisher = Publisher(self.engine, server, "m", recipe.publish, gate=recipe.gate)
        settings = TrainerSettings.model_validate({"adapter_dir": self.folder})
        return Loop(settings, recipe, self.engine, publisher, self.learner, "m")

    async def states(self) -> dict[int, str]:
        async with self.engine.connect() as connection:
            return {v.version: v.state for v in await list_versions(connection, "m")}

    async def assert_spent_once(self, episodes: int) -> None:
        async with self.engine.connect() as connection:
            counted = await totals(connection)
        assert counted.consumed_episodes == episodes
        assert counted.twice_consumed_episodes == 0


@pytest.fixture
async def bench(engine: AsyncEngine, tmp_path: Path) -> AsyncIterator[Bench]:
    async with fake_model_server() as server:
        made = Bench(engine, server, tmp_path)
        await made.fill()
        yield made


async def run_once(bench: Bench) -> bool:
    async with Replicas([bench.fake.url]) as server:
        loop = bench.loop(server)
        await loop.recover()
        return await loop.update_once()


STEPS = {
    "before training": killing(FakeLearner, "update", after=False),
    "after training": killing(FakeLearner, "update", after=True),
    "while saving": killing(FakeLearner, "save", after=True),
    "before the version exists": killing(adapters, "write_version", after=False),
    "after the version exists": killing(adapters, "write_version", after=True),
    "before consuming": killing(claims, "consume", after=False),
    "within the consuming transaction": killing(claims, "consume", after=True),
    "before publishing": killing(Publisher, "publish", after=False),
    "after loading": killing(ModelServer, "load", after=True),
    "before promoting": killing(version_states, "promote", after=False),
    "within the promoting transaction": killing(version_states, "promote", after=True),
    "after promoting": killing(Publisher, "publish", after=True),
}
