"""A trainer killed at any step of an update: nothing lost, nothing trained twice."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import select

from store import claims, version_queries
from store.read.episodes import episode_ids
from store.schema.tables import consumptions, updates
from store.write.ingest import ingest
from tests.support.faults.killing import Killed, killing
from tests.support.faults.unreadable import unreadable
from tests.support.records import call
from tests.support.trainer.recovery import STEPS, Bench, FakeLearner, bench, run_once
from trainer.errors import DriftOutOfBounds, FilesUnread
from trainer.publishing import adapters
from trainer.publishing.model_server import Replicas
from trainer.publishing.publisher import Publisher
from trainer.recipes.recipe import PublishOptions

__all__ = ["bench"]


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
        version = await version_queries.numbered_version(connection, "m", 1)
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
