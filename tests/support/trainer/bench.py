"""Run a trainer's loop on real tables, with a learner that only takes its steps."""

import errno
import threading
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, get_args

import pytest
from prometheus_client import REGISTRY
from pydantic import SecretStr
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from controller import publishing
from controller.publishing import Publishing
from store import claims, version_states
from store.claims import UpdateRow, list_updates
from store.records import CallRecord, SpoolRecord
from store.schema.tables import consumptions, episode_policies
from store.values.packing import pack_logprobs
from store.version_queries import list_versions, numbered_version
from store.version_states import ensure_base
from store.versions import PolicyVersion
from tests.support.controller.publishing import PublishedLoop
from tests.support.faults.killing import Killed, killing
from tests.support.ledger.episodes import ingest
from tests.support.ledger.totals import totals
from tests.support.records import call, reward, tokens
from tests.support.servers.fake_server import FakeModelServer
from trainer.batches import Row, RowKey, bare_row
from trainer.errors import DriftOutOfBounds, Interrupted, LearnerError
from trainer.publishing import adapters
from trainer.publishing.adapters import write_base_hash
from trainer.publishing.model_server import ModelServer, Replicas
from trainer.recipes.recipe import ClaimOptions, Recipe
from trainer.settings import TrainerSettings
from trainer.updates.circuit_breaker import PauseReason
from trainer.updates.self_test import SELF_TEST

RECIPE: Final = Recipe(claim=ClaimOptions(group_size=2, groups=2, max_age_s=1e9))
# The log-probability of any token of any row by the scripted learner, and by a server that fits.
OWN: Final = -0.5
# What the self-test's adapter gives each token.
TEST_LOGPROB: Final = -1.0


class FakeLearner:
    """Count what it trains on. The real one is tested by itself; here only the steps matter."""

    def __init__(self, server: FakeModelServer, folder: Path, policy: str = "m") -> None:
        self._server = server
        self._policy = policy
        self._versions = folder.resolve() / policy
        self.updates = 0
        self.compared: dict[RowKey, bytes] = {}
        self.restored: Path | None = None
        # The versions asked for missing log-probabilities, and of how many rows.
        self.asked: list[tuple[Path | None, int]] = []
        self.fails: LearnerError | None = None
        self.restore_fails: Exception | None = None
        # Set: the first row of each update was sampled from another model.
        self.drifts = False
        self.interrupted = threading.Event()
        # Set: an update goes on until it is interrupted.
        self.slow = False
        self.full_disk = 0
        # How often its micro-batches were halved.
        self.halvings = 0
        # How far from the base model each update ends, if it measures that.
        self.kl_to_base: float | None = None
        # How much higher the server's log-probabilities of a version are than the trainer's.
        self.served_off = 0.0
        # Adapters that were written for self-tests, and what the server makes of them.
        self.self_tests = 0
        self.test_logprob = TEST_LOGPROB
        # The kinds of layers that an adapter has, and those that the server ignores.
        self.kinds: list[str] = []
        self.ignored: set[str] = set()
        # Those that it ignores at their first test.
        self.ignored_once: set[str] = set()
        # Set once it does what a test waits for.
        self.begun = threading.Event()

    def interrupt(self) -> None:
        self.interrupted.set()

    def restore(self, adapter: Path | None) -> None:
        if self.restore_fails:
            raise self.restore_fails
        self.restored = adapter

    @property
    def parent(self) -> int:
        """Return the version that the last update trained on from."""
        return 0 if self.restored is None else int(self.restored.name)

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
        self.compared = {row.key: pack_logprobs([-2.0] * len(row.sampled_ids)) for row in rows}
        measured = {} if self.kl_to_base is None else {"kl_to_base": self.kl_to_base}
        return {"loss": 0.5, "rows": len(rows), **measured}

    def policy_logprobs(self) -> dict[RowKey, bytes]:
        return self.compared

    def save(self, folder: Path) -> None:
        if self.full_disk:
            self.full_disk -= 1
            self.begun.set()
            (folder / "half").write_bytes(b"weig")
            raise OSError(errno.ENOSPC, "No space left on device")
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_bytes(b"weights")
        write_base_hash(folder, f"base of {len(list(self._versions.glob('[0-9]*')))}")

    def why_another_base(self, adapter: Path) -> str | None:
        return None

    def set_served_context(self, tokens: int) -> None:
        assert tokens > 0

    def layer_kinds(self) -> list[str]:
        return self.kinds

    def halve_micro_batches(self, halvings: int) -> int:
        self.halvings = halvings
        return 64

    def leave_out_kinds(self, kinds: Collection[str]) -> None:
        self.kinds = [kind for kind in self.kinds if kind not in kinds]

    def write_test_adapter(self, folder: Path, kind: str | None = None) -> list[Row]:
        self.self_tests += 1
        served = OWN if kind in self.ignored else self.test_logprob
        if kind is None and self.ignored.intersection(self.kinds):
            served = (OWN + served) / 2
        if kind in self.ignored_once:
            self.ignored_once.remove(kind)
            served = OWN
        self._server.logprobs[f"{self._policy}@{folder.name}"] = served
        for name in adapters.SERVED_FILES:
            (folder / name).write_text(f"{name} of self-test {self.self_tests}")
        return self.probe_rows()

    def probe_rows(self) -> list[Row]:
        return [bare_row(0, [1, 2, 3], [4, 5])]

    def vocabulary_probe(self) -> tuple[str, list[int]]:
        return "words", [7]

    def rehearse(self) -> None:
        if self.fails:
            raise self.fails

    def why_unreplayable(self, distribution: Any, sampled_ids: Any) -> str | None:
        return None

    def version_logprobs(self, adapter: Path | None, rows: Any) -> list[list[float]]:
        if not all(row.sampled_logprobs for row in rows):
            self.asked.append((adapter, len(rows)))
        moved = adapter is not None and adapter.name == SELF_TEST
        return [[TEST_LOGPROB if moved else OWN] * len(row.sampled_ids) for row in rows]

    def mark_saved(self, adapter: Path) -> None:
        assert adapter.parent == self._versions

    def logprobs(self, rows: Any) -> list[list[float]]:
        """Give every token −1 − N by version N, here and on the server."""
        version = 1 + max((int(one.name) for one in self._versions.glob("[0-9]*")), default=0)
        value = -1.0 - version
        self._server.logprobs.setdefault(f"{self._policy}@{version}", value + self.served_off)
        return [[value] * len(row.sampled_ids) for row in rows]


def unchanged(task: int, member: int) -> dict[str, Any]:
    return {}


class Bench:
    """Run a loop on real tables: policy `m`, a scripted learner and a scripted model server."""

    def __init__(self, engine: AsyncEngine, server: FakeModelServer, folder: Path) -> None:
        self.engine = engine
        self.fake = server
        self.folder = folder
        self.recipe = RECIPE
        self.slots: int | None = None
        self.teacher_key: SecretStr | None = None
        self.learner: Any = FakeLearner(server, folder)
        server.logprobs["m"] = OWN

    def restart(self) -> None:
        """Forget the learner, as the end of a process does."""
        self.learner = FakeLearner(self.fake, self.folder)

    def change(self, section: str, **options: Any) -> None:
        """Change options of a section of the recipe."""
        changed = getattr(self.recipe, section).model_copy(update=options)
        self.recipe = self.recipe.model_copy(update={section: changed})

    async def fill(
        self,
        name: str = "t",
        each: Callable[[int, int], dict[str, Any]] = unchanged,
        *,
        groups: int = 2,
        rewards: Sequence[float] = (0.0, 1.0),
        **changes: Any,
    ) -> list[CallRecord]:
        """Store groups of scored episodes of one call; a group has an episode for each reward.

        `each` changes the call of one member of one task, `changes` that of all.
        """
        calls: list[CallRecord] = []
        records: list[SpoolRecord] = []
        for task in range(groups):
            for member, value in enumerate(rewards):
                episode, made = f"{name}{task}-{member}", tokens([1, 2, task], [4 + member])
                asked = {"task": f"{name}{task}", "tokens": made} | changes | each(task, member)
                calls.append(call(episode, **asked))
                records += [calls[-1], reward(value, episode=episode)]
        async with self.engine.begin() as connection:
            await ensure_base(connection, "m")
            await ingest(connection, records)
        return calls

    def loop(self, servers: Replicas) -> PublishedLoop:
        settings = TrainerSettings(adapter_dir=self.folder, teacher_api_key=self.teacher_key)
        return PublishedLoop(settings, self.recipe, self.engine, servers, self.learner, "m")

    @asynccontextmanager
    async def working(self, *urls: str) -> AsyncIterator[PublishedLoop]:
        """Start a trainer on the scripted model server, or on those at `urls`."""
        async with Replicas(urls or [self.fake.url], self.slots) as servers:
            loop = self.loop(servers)
            await loop.recover()
            yield loop

    async def run_once(self) -> bool:
        async with self.working() as loop:
            return await loop.update_once()

    async def update(self, *names: str, **fill: Any) -> None:
        """Run an update for each of these sets of episodes, by a trainer of its own."""
        for name in names:
            await self.fill(name, **fill)
            assert await self.run_once()

    async def run_killed(
        self, monkeypatch: pytest.MonkeyPatch, kill: Callable[[pytest.MonkeyPatch], None]
    ) -> None:
        """Run a trainer until it is killed."""
        kill(monkeypatch)
        with pytest.raises(Killed):
            await self.run_once()
        self.restart()

    async def states(self) -> dict[int, str]:
        async with self.engine.connect() as connection:
            return {v.version: v.state for v in await list_versions(connection, "m")}

    async def version(self, number: int) -> PolicyVersion:
        async with self.engine.connect() as connection:
            found = await numbered_version(connection, "m", number)
        assert found is not None
        return found

    async def updates(self) -> list[UpdateRow]:
        async with self.engine.connect() as connection:
            return await list_updates(connection, "m")

    async def last_metrics(self) -> dict[str, Any]:
        return dict((await self.updates())[-1].metrics)

    async def consumed(self) -> int:
        async with self.engine.connect() as connection:
            return len((await connection.execute(select(consumptions.c.episode_id))).all())

    async def claimed(self) -> int:
        """Return how many episodes are held by an update."""
        held = episode_policies.c.claimed_by.is_not(None)
        query = select(func.count()).select_from(episode_policies).where(held)
        async with self.engine.connect() as connection:
            return int(await connection.scalar(query) or 0)

    async def assert_spent_once(self, episodes: int) -> None:
        async with self.engine.connect() as connection:
            counted = await totals(connection)
        assert counted.consumed_episodes == episodes
        assert counted.twice_consumed_episodes == 0


def gauge(name: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"policy": "m"})


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


async def try_again(loop: PublishedLoop) -> bool:
    """Do what the loop does once its pause is over."""
    loop._breaker._test_at = 0.0
    await loop.test_if_due()
    return await loop.update_once()


STEPS = {
    "before training": killing(FakeLearner, "update", after=False),
    "after training": killing(FakeLearner, "update", after=True),
    "while saving": killing(FakeLearner, "save", after=True),
    "before the version exists": killing(adapters, "write_version", after=False),
    "after the version exists": killing(adapters, "write_version", after=True),
    "before consuming": killing(claims, "record_update", after=False),
    "within the consuming transaction": killing(claims, "record_update", after=True),
    "before publishing": killing(Publishing, "_publish", after=False),
    "after loading": killing(ModelServer, "load", after=True),
    "before it is loaded": killing(publishing, "make_loaded", after=False),
    "within that transaction": killing(publishing, "make_loaded", after=True),
    "before promoting": killing(version_states, "promote", after=False),
    "within the promoting transaction": killing(version_states, "promote", after=True),
    "after it is loaded": killing(Publishing, "_publish", after=True),
    "after promoting": killing(publishing, "log_promoted", after=False),
}
