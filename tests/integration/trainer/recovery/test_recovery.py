"""A trainer killed or stopped at any step of an update: nothing lost, nothing trained twice."""

import asyncio
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from structlog.testing import capture_logs

from controller.publishing import Publishing
from store import claims
from store.database import make_engine
from store.errors import ClaimLost
from store.schema.tables import consumptions
from store.selecting import select_episodes
from tests.support.controller.replicas import reconcile
from tests.support.faults.unreadable import unreadable
from tests.support.ledger.episodes import ingest
from tests.support.records import call
from tests.support.trainer.bench import STEPS, Bench, FakeLearner
from trainer.errors import DriftOutOfBounds, FilesUnread
from trainer.publishing import adapters
from trainer.publishing.adapters import NewVersion
from trainer.publishing.model_server import Replicas


async def test_version_of_an_update_goes_live_and_its_episodes_are_spent_once(bench: Bench) -> None:
    assert await bench.run_once()
    assert await bench.states() == {0: "retired", 1: "serving"}
    assert bench.fake.loads == ["m@1"]
    await bench.assert_spent_once(4)
    # A version's files hold nothing of the episodes that it was trained on.
    manifest = adapters.read_manifest(adapters.version_folder(bench.folder, "m", 1))
    assert manifest is not None
    assert [list(row.ids) for row in manifest.probe] == [[1, 2, 3, 4, 5]]
    assert not await bench.run_once()


async def test_the_next_update_continues_from_the_serving_version(bench: Bench) -> None:
    assert await bench.run_once()
    await bench.update("u")
    assert bench.learner.restored == adapters.version_folder(bench.folder, "m", 1)
    assert await bench.states() == {0: "retired", 1: "retired", 2: "serving"}
    await bench.assert_spent_once(8)


async def record_evaluation(bench: Bench) -> None:
    """Let an episode of an update turn out to be evaluation."""
    async with bench.engine.begin() as connection:
        await ingest(connection, [call("t0-0", task="t0", split="eval")])


@pytest.mark.parametrize("when", ["update", "save"])
async def test_an_update_is_given_up_if_an_episode_turns_out_to_be_evaluation(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    real = getattr(FakeLearner, when)
    loop = asyncio.get_running_loop()

    def turning(*args: Any) -> Any:
        monkeypatch.undo()
        asyncio.run_coroutine_threadsafe(record_evaluation(bench), loop).result(20)
        return real(*args)

    monkeypatch.setattr(FakeLearner, when, turning)
    # One group is short of a member now, so nothing is left to train on.
    assert not await bench.run_once()
    assert await bench.states() == {0: "serving"}
    assert bench.fake.loads == []
    await bench.assert_spent_once(0)
    # The number of the version that was given up is never used again.
    await bench.update("u")
    assert await bench.states() == {0: "retired", 2: "serving"}
    await bench.assert_spent_once(4)


async def test_killed_update_is_given_up_if_an_episode_turned_evaluation(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.run_killed(monkeypatch, STEPS["before consuming"])
    await record_evaluation(bench)
    assert not await bench.run_once()
    assert await bench.states() == {0: "serving"}
    await bench.assert_spent_once(0)
    async with bench.engine.connect() as connection:
        assert await claims.running_update(connection, "m") is None


@pytest.mark.parametrize("step", STEPS)
async def test_killed_update_goes_live_and_spends_episodes_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    await bench.run_killed(monkeypatch, STEPS[step])
    await bench.run_once()
    await bench.run_once()
    assert await bench.states() == {0: "retired", 1: "serving"}
    await bench.assert_spent_once(4)


WAITING_STEPS = {
    name: STEPS[name]
    for name in (
        "before the version exists",
        "after the version exists",
        "within the consuming transaction",
        "before publishing",
        "after loading",
        "before it is loaded",
        "within that transaction",
        "after it is loaded",
    )
}


@pytest.mark.parametrize("step", WAITING_STEPS)
async def test_killed_update_waits_for_its_decision_and_spends_episodes_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    bench.change("publish", mode="canary")
    await bench.run_killed(monkeypatch, WAITING_STEPS[step])
    await bench.run_once()
    await bench.run_once()
    assert await bench.states() == {0: "serving", 1: "loaded"}
    await bench.assert_spent_once(4)


async def test_after_two_kills_in_a_row_the_next_update_takes_less_memory(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may have killed them for it."""
    with capture_logs() as logs:
        for _ in range(3):
            await bench.run_killed(monkeypatch, STEPS["before training"])
    told = [line["updates"] for line in logs if line["event"] == "trainer_killed_again"]
    assert told == [2]
    assert await bench.run_once()
    assert bench.learner.halvings == 2
    bench.restart()
    await bench.update("u")
    assert bench.learner.halvings == 0
    await bench.assert_spent_once(8)


async def test_version_written_before_a_kill_of_the_trainer_is_probed_too(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.run_killed(monkeypatch, STEPS["before publishing"])
    bench.fake.logprobs["m@1"] = -7.0
    await bench.run_once()
    assert await bench.states() == {0: "serving", 1: "rejected"}


# What cannot be read for now


@pytest.mark.parametrize("name", [adapters.MANIFEST, *adapters.SERVED_FILES])
async def test_a_version_that_cannot_be_read_for_now_is_published_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    await bench.run_killed(monkeypatch, STEPS["before publishing"])
    file = adapters.version_folder(bench.folder, "m", 1) / name
    async with Replicas([bench.fake.url]) as server:
        publishing = Publishing(server)
        with unreadable(file):
            await publishing.look(bench.engine)
            assert f"{name} cannot be read" in publishing.waiting["m@1"]
            await bench.loop(server).recover()
        assert (await bench.states())[1] == "written"
        await bench.loop(server).recover()
    assert await bench.states() == {0: "retired", 1: "serving"}


async def test_unreadable_version_does_not_keep_another_from_being_reloaded(
    bench: Bench,
) -> None:
    assert await bench.run_once()
    await bench.update("u")
    bench.fake.loaded.clear()
    async with Replicas([bench.fake.url]) as server:
        with unreadable(adapters.version_folder(bench.folder, "m", 2) / adapters.SERVED_FILES[1]):
            await reconcile(bench.engine, server)
            assert list(bench.fake.loaded) == ["m@1"]
        await reconcile(bench.engine, server)
    assert set(bench.fake.loaded) == {"m@1", "m@2"}


@pytest.mark.parametrize("at", ["start", "stop"])
async def test_killed_update_stays_open_while_its_files_are_unreadable(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    await bench.run_killed(monkeypatch, STEPS["before consuming"])
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
    assert await bench.states() == {0: "retired", 1: "serving"}
    await bench.assert_spent_once(4)


async def test_drifting_episode_is_spent_and_its_drift_is_recorded(
    bench: Bench,
) -> None:
    """Spent: it is consumed untrained, with the reason `drift`."""
    async with bench.engine.connect() as connection:
        [odd, *_] = await select_episodes(connection)
    bench.learner.fails = DriftOutOfBounds(
        "server and trainer differ", {odd: "by 0.3"}, {"drift_kl": 0.3}
    )
    assert not await bench.run_once()
    assert await bench.states() == {0: "serving"}
    async with bench.engine.connect() as connection:
        query = select(consumptions.c.episode_id, consumptions.c.reason).distinct()
        assert (await connection.execute(query)).all() == [(odd, "drift")]
    [metrics] = [one.metrics for one in await bench.updates() if one.state == "expired"]
    assert metrics["error"] == "server and trainer differ"
    assert metrics["drift_kl"] == 0.3
    assert metrics["drift"] == {str(odd): "by 0.3"}


# Stopped, without room, or without its claim


@pytest.mark.parametrize("stopped", ["in training", "while the disk is full"])
async def test_an_update_that_is_stopped_gives_its_episodes_back_at_once(
    bench: Bench, caplog: pytest.LogCaptureFixture, stopped: str
) -> None:
    if stopped == "in training":
        bench.learner.slow = True
    else:
        bench.learner.full_disk = 1
    async with bench.working() as loop:
        work = asyncio.create_task(loop.update_once())
        assert await asyncio.to_thread(bench.learner.begun.wait, 10.0)
        # As by SIGTERM.
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
    assert await bench.claimed() == 0
    assert list(bench.folder.glob("m/*")) == []
    gc.collect()
    assert "Interrupted" not in caplog.text
    bench.restart()
    assert await bench.run_once()
    await bench.assert_spent_once(4)


async def test_full_disk_delays_the_version_without_training_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.updates.training.WRITE_AGAIN_S", 0.01)
    bench.learner.full_disk = 3
    assert await bench.run_once()
    assert bench.learner.updates == 1
    assert await bench.states() == {0: "retired", 1: "serving"}
    assert [path.name for path in (bench.folder / "m").iterdir()] == ["1"]
    await bench.assert_spent_once(4)


async def test_update_that_lost_its_claim_to_another_trainer_records_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection was gone for a while: the other freed the claim, then it wrote its version."""
    real = adapters.write_version

    def too_late(root: Path, new: NewVersion, save: Callable[[Path], None]) -> Path:
        monkeypatch.undo()

        async def release() -> None:
            own = make_engine(bench.engine.url.render_as_string(hide_password=False))
            async with own.begin() as connection:
                await claims.release(connection, new.update_id, "taken over")
            await own.dispose()

        asyncio.run(release())
        return real(root, new, save)

    monkeypatch.setattr(adapters, "write_version", too_late)
    with pytest.raises(ClaimLost):
        await bench.run_once()
    await bench.assert_spent_once(0)
    # The number of the version that nobody recorded is not used for other bytes.
    bench.restart()
    assert await bench.run_once()
    assert await bench.states() == {0: "retired", 2: "serving"}
    await bench.assert_spent_once(4)
