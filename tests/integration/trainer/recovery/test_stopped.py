"""A trainer that is stopped, is done, has no room, or lost its claim: nothing is half done."""

import asyncio
import gc
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import func, select

from store import claims
from store.database import make_engine
from store.errors import ClaimLost
from store.schema.tables import episode_policies
from tests.support.trainer.recovery import Bench, FakeLearner, bench, run_once
from trainer.publishing import adapters
from trainer.publishing.adapters import NewVersion
from trainer.publishing.model_server import Replicas

__all__ = ["bench"]


async def claimed(bench: Bench) -> int:
    async with bench.engine.connect() as connection:
        found = await connection.scalar(
            select(func.count()).where(episode_policies.c.claimed_by.is_not(None))
        )
    return int(found or 0)


async def stopped(bench: Bench) -> None:
    """An update that is cancelled, as by SIGTERM, once the learner has begun."""
    async with Replicas([bench.fake.url]) as server:
        loop = bench.loop(server)
        await loop.recover()
        work = asyncio.create_task(loop.update_once())
        assert await asyncio.to_thread(bench.learner.begun.wait, 10.0)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work


async def test_one_that_is_stopped_gives_its_episodes_back_at_once(bench: Bench) -> None:
    bench.learner.slow = True
    await stopped(bench)
    assert await claimed(bench) == 0
    bench.learner = FakeLearner(bench.fake, bench.folder.resolve())
    assert await run_once(bench)
    await bench.assert_spent_once(4)


async def test_one_that_is_stopped_logs_no_error(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.learner.slow = True
    await stopped(bench)
    gc.collect()
    assert "Interrupted" not in caplog.text


async def test_a_full_disk_is_waited_for_and_nothing_is_trained_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.updates.training.WRITE_AGAIN_S", 0.01)
    bench.learner.full_disk = 3
    assert await run_once(bench)
    assert bench.learner.updates == 1
    assert await bench.states() == {0: "published", 1: "serving"}
    assert [path.name for path in (bench.folder / "m").iterdir()] == ["1"]
    await bench.assert_spent_once(4)


async def test_one_that_is_stopped_while_the_disk_is_full_gives_its_episodes_back(
    bench: Bench,
) -> None:
    bench.learner.full_disk = 1
    await stopped(bench)
    assert await claimed(bench) == 0
    assert list((bench.folder / "m").iterdir()) == []


async def test_one_whose_claim_another_took_over_writes_nothing_down(
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
        await run_once(bench)
    await bench.assert_spent_once(0)
    # The number of the version that nobody recorded is not used for other bytes.
    bench.learner = FakeLearner(bench.fake, bench.folder.resolve())
    assert await run_once(bench)
    assert await bench.states() == {0: "published", 2: "serving"}
    await bench.assert_spent_once(4)
