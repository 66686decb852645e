"""A trainer killed at any step of an update: nothing lost, nothing trained twice."""

import asyncio
import errno
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from store.read.episodes import episode_ids
from store.read.stats import totals
from store.records import SpoolRecord
from store.schema.trained import consumptions, updates
from store.updates import claims, policies
from store.updates.policies import ensure_base, list_versions
from store.write.ingest import ingest
from tests.support.faults.killing import Killed, killing
from tests.support.faults.unreadable import unreadable
from tests.support.records import call, reward, tokens
from tests.support.servers.fake_server import FakeModelServer, fake_model_server
from trainer.batches.rows import Row, bare_row
from trainer.errors import DriftOutOfBounds, FilesUnread, Interrupted, LearnerError
from trainer.loop import Loop
from trainer.publishing import adapters
from trainer.publishing.progress import write_progress
from trainer.publishing.publish import Publisher
from trainer.publishing.replicas import Replicas
from trainer.publishing.server import ModelServer
from trainer.recipes.adapter import PublishOptions
from trainer.recipes.claim import ClaimOptions
from trainer.recipes.gate import GateOptions
from trainer.recipes.recipe import Recipe
from trainer.recipes.training import OptimizerOptions
from trainer.settings import TrainerSettings


class FakeLearner:
    """Counts what it trains on. The real one is tested by itself; here only the steps matter."""

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
        write_progress(folder, 1 + len(list(self._versions.glob("[0-9]*"))))

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
        """Version N gives every token −1 − N, here and on the server."""
        version = 1 + len(list(self._versions.glob("[0-9]*")))
        value = -1.0 - version
        self._server.logprobs.setdefault(f"m@{version}", value)
        return [[value] * len(row.sampled_ids) for row in rows]


class Bench:
    """A loop on real tables with two claimable groups."""

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


async def test_an_update_goes_live(bench: Bench) -> None:
    assert await run_once(bench)
    assert await bench.states() == {0: "published", 1: "serving"}
    assert bench.fake.loads == ["m@1"]
    await bench.assert_spent_once(4)
    assert not await run_once(bench)


async def test_a_versions_files_hold_nothing_of_the_episodes_it_was_trained_on(
    bench: Bench,
) -> None:
    await run_once(bench)
    manifest = adapters.read_manifest(adapters.version_folder(bench.folder, "m", 1))
    assert manifest is not None
    assert [list(row.ids) for row in manifest.probe] == [[1, 2, 3, 4, 5]]


async def test_the_next_update_continues_from_the_serving_version(bench: Bench) -> None:
    await run_once(bench)
    await bench.fill("u")
    await run_once(bench)
    assert bench.learner.restored == adapters.version_folder(bench.folder, "m", 1)
    assert await bench.states() == {0: "published", 1: "published", 2: "serving"}
    await bench.assert_spent_once(8)


async def say_evaluation(bench: Bench, episode: str, task: str) -> None:
    async with bench.engine.begin() as connection:
        await ingest(connection, [call(episode, task=task, split="eval")])


@pytest.mark.parametrize("when", ["update", "save"])
async def test_an_update_is_given_up_if_an_episode_turns_out_to_be_evaluation(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    real = getattr(FakeLearner, when)
    loop = asyncio.get_running_loop()

    def turning(*args: Any) -> Any:
        monkeypatch.undo()
        asyncio.run_coroutine_threadsafe(say_evaluation(bench, "t0-0", "t0"), loop).result(20)
        return real(*args)

    monkeypatch.setattr(FakeLearner, when, turning)
    # One group is short of a member now, so nothing is left to train on.
    assert not await run_once(bench)
    assert await bench.states() == {0: "serving"}
    assert bench.fake.loads == []
    await bench.assert_spent_once(0)
    await bench.fill("u")
    # The number of the version that was given up is never used again.
    assert await run_once(bench)
    assert await bench.states() == {0: "published", 2: "serving"}
    await bench.assert_spent_once(4)


async def test_a_version_whose_episode_turned_evaluation_is_given_up_after_a_kill(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    killing(claims, "consume", after=False)(monkeypatch)
    with pytest.raises(Killed):
        await run_once(bench)
    await say_evaluation(bench, "t0-0", "t0")
    assert not await run_once(bench)
    assert await bench.states() == {0: "serving"}
    await bench.assert_spent_once(0)
    async with bench.engine.connect() as connection:
        assert await claims.running_update(connection, "m") is None


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
    "before promoting": killing(policies, "promote", after=False),
    "within the promoting transaction": killing(policies, "promote", after=True),
    "after promoting": killing(Publisher, "publish", after=True),
}


@pytest.mark.parametrize("step", STEPS)
async def test_killed_at(bench: Bench, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    STEPS[step](monkeypatch)
    with pytest.raises(Killed):
        await run_once(bench)
    bench.learner = FakeLearner(bench.fake, bench.folder.resolve())
    await run_once(bench)
    await run_once(bench)
    assert await bench.states() == {0: "published", 1: "serving"}
    await bench.assert_spent_once(4)


async def test_what_a_version_found_after_a_kill_replaces_is_deleted_when_it_goes_live(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = bench.folder.resolve() / "m"
    for update in range(3):
        await bench.fill(f"more{update}")
        assert await run_once(bench)
        (states / f"{update + 1}" / adapters.STATE).mkdir()
    await bench.fill("last")
    with monkeypatch.context() as patched:
        STEPS["before publishing"](patched)
        with pytest.raises(Killed):
            await run_once(bench)
    async with Replicas([bench.fake.url]) as server:
        await bench.loop(server).recover()
    assert (await bench.states())[4] == "serving"
    assert [path.parent.name for path in states.glob(f"*/{adapters.STATE}")] == ["3"]


async def test_a_version_that_is_not_served_right_is_rejected(bench: Bench) -> None:
    bench.fake.logprobs["m@1"] = -7.0
    await run_once(bench)
    assert await bench.states() == {0: "serving", 1: "rejected"}
    assert bench.fake.loaded == {}
    await bench.fill("u")
    await run_once(bench)
    assert bench.learner.restored is None
    assert await bench.states() == {0: "published", 1: "rejected", 2: "serving"}


async def test_a_version_found_after_a_crash_is_probed_too(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    STEPS["before publishing"](monkeypatch)
    with pytest.raises(Killed):
        await run_once(bench)
    bench.fake.logprobs["m@1"] = -7.0
    await run_once(bench)
    assert await bench.states() == {0: "serving", 1: "rejected"}


@pytest.mark.parametrize("name", [adapters.MANIFEST, *adapters.SERVED])
async def test_a_version_that_cannot_be_read_for_now_is_published_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    STEPS["before publishing"](monkeypatch)
    with pytest.raises(Killed):
        await run_once(bench)
    file = adapters.version_folder(bench.folder, "m", 1) / name
    async with Replicas([bench.fake.url]) as server, bench.engine.connect() as connection:
        version = await policies.numbered_version(connection, "m", 1)
        assert version is not None
        publisher = Publisher(bench.engine, server, "m", PublishOptions())
        with unreadable(file):
            with pytest.raises(FilesUnread, match=f"{name} cannot be read"):
                await publisher.try_to_publish(version, "m", ())
            with pytest.raises(FilesUnread, match=f"{name} cannot be read"):
                await bench.loop(server).recover()
        assert (await bench.states())[1] == "written"
        await bench.loop(server).recover()
    assert await bench.states() == {0: "published", 1: "serving"}


async def test_what_cannot_be_read_for_now_stops_no_other_from_being_loaded_again(
    bench: Bench,
) -> None:
    await run_once(bench)
    await bench.fill("u")
    await run_once(bench)
    bench.fake.loaded.clear()
    async with Replicas([bench.fake.url]) as server:
        with unreadable(adapters.version_folder(bench.folder, "m", 2) / adapters.SERVED[1]):
            await bench.loop(server).sync_adapters()
            assert list(bench.fake.loaded) == ["m@1"]
        await bench.loop(server).sync_adapters()
    assert set(bench.fake.loaded) == {"m@1", "m@2"}


@pytest.mark.parametrize("at", ["start", "stop"])
async def test_a_killed_update_is_neither_recorded_nor_freed_while_its_files_cannot_be_read(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    STEPS["before consuming"](monkeypatch)
    with pytest.raises(Killed):
        await run_once(bench)
    file = adapters.version_folder(bench.folder, "m", 1) / adapters.MANIFEST
    async with Replicas([bench.fake.url]) as server:
        with unreadable(file):
            if at == "start":
                with pytest.raises(FilesUnread):
                    await bench.loop(server).recover()
            else:
                await bench.loop(server)._recovery.finish_if_possible("the trainer was stopped")
        async with bench.engine.connect() as connection:
            assert await claims.running_update(connection, "m") is not None
        await bench.loop(server).recover()
    assert await bench.states() == {0: "published", 1: "serving"}
    await bench.assert_spent_once(4)


async def test_a_version_that_cannot_be_loaded_again_stops_nothing(bench: Bench) -> None:
    await run_once(bench)
    bench.fake.loaded.clear()
    bench.fake.refuse_load = True
    async with Replicas([bench.fake.url]) as server:
        await bench.loop(server).sync_adapters()
        bench.fake.refuse_load = False
        await bench.loop(server).sync_adapters()
    assert list(bench.fake.loaded) == ["m@1"]


async def test_a_parent_that_the_server_has_lost_for_good_keeps_nothing_from_going_live(
    bench: Bench,
) -> None:
    """The probe compares with the base model instead: the version is what repairs the policy."""
    await run_once(bench)
    await bench.fill("u")
    bench.fake.loaded.clear()
    bench.fake.refused = {"m@1"}
    assert await run_once(bench)
    assert (await bench.states())[2] == "serving"
    await bench.fill("v")
    bench.fake.refused = {"m@2"}
    bench.fake.loaded.clear()
    # What is served as the base model has not been loaded.
    bench.fake.logprobs["m"] = bench.fake.logprobs["m@3"] = -4.0
    assert await run_once(bench)
    assert (await bench.states())[3] == "rejected"
    await bench.assert_spent_once(12)


async def test_a_server_that_refuses_the_load_keeps_the_old_version(bench: Bench) -> None:
    bench.fake.refuse_load = True
    await run_once(bench)
    assert await bench.states() == {0: "serving", 1: "rejected"}


async def test_an_update_past_the_bound_on_drift_spends_what_drifts_and_says_so(
    bench: Bench,
) -> None:
    async with bench.engine.connect() as connection:
        [odd, *_] = await episode_ids(connection)
    bench.learner.fails = DriftOutOfBounds(
        "server and trainer differ", {odd: "by 0.3"}, {"drift_kl": 0.3}
    )
    assert not await run_once(bench)
    assert await bench.states() == {0: "serving"}
    async with bench.engine.connect() as connection:
        spent = await connection.execute(
            select(consumptions.c.episode_id, consumptions.c.reason).distinct()
        )
        assert spent.all() == [(odd, "drift")]
        query = select(updates.c.metrics).where(updates.c.state == "expired")
        metrics = (await connection.execute(query)).scalars().first() or {}
    assert metrics["error"] == "server and trainer differ"
    assert metrics["drift_kl"] == 0.3
    assert metrics["drift"] == {str(odd): "by 0.3"}


async def test_a_restarted_server_gets_its_adapters_back(bench: Bench) -> None:
    await run_once(bench)
    bench.fake.loaded.clear()
    async with Replicas([bench.fake.url]) as server:
        await bench.loop(server).sync_adapters()
    assert list(bench.fake.loaded) == ["m@1"]
