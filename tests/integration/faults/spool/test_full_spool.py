"""A spool on a full disk: what is lost is marked and counted, and there is room for the mark."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.values import MutexValue
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.ingester.drain import Drainer
from proxy.spool import recorder as recording
from proxy.spool.recorder import Recorder
from store.read.episodes import episode_ids, read_episodes
from tests.integration.faults.test_failing_disk import failing
from tests.support.faults.counters import assert_adds_up, ledger
from tests.support.records import captured
from tests.support.waiting import eventually

__all__ = ["failing"]


DROPPED_TOTAL = "pawl_records_dropped_total"


def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A disk of its own, from mount(8)'s options."""
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False).returncode:
        pytest.skip("no disk can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk on which five files can be, its root among them."""
    yield from mounted(tmp_path, "size=64k,nr_inodes=5")


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk that takes a reserve, and can be filled with a file."""
    yield from mounted(tmp_path, "size=4m")


def fill(disk: Path) -> None:
    with (disk / "balloon").open("wb", buffering=0) as balloon, suppress(OSError):
        while True:
            balloon.write(bytes(4096))


async def incomplete(engine: AsyncEngine) -> set[str]:
    async with engine.connect() as connection:
        found = await read_episodes(connection, await episode_ids(connection))
    return {e.key for e in found if "lost" in (e.quarantined_reason or "")}


@pytest.mark.parametrize("frames", [20, 700])
async def test_a_full_disk_takes_the_mark_of_what_it_lost_before_anybody_is_answered(
    engine: AsyncEngine, full_disk: Path, frames: int
) -> None:
    before = ledger()["pawl_records_dropped_total"]
    recorder = Recorder(full_disk, segment_bytes=2**20)
    assert await recorder.take(captured("whole"))
    fill(full_disk)
    # The last page of the segment has room for a few.
    episodes = [f"e-{number}" for number in range(frames)]
    lost = [e for e in episodes if not await recorder.take(captured(e))]
    assert len(lost) > frames // 4
    # Nothing of it is in memory: the worker may be killed now, and the disk is still full.
    assert recorder._gaps == {}
    assert ledger()["pawl_records_dropped_total"] == before + len(lost)
    drainer = Drainer(full_disk, lambda: engine, batch=100)
    while await drainer.drain_once():
        pass
    assert await incomplete(engine) == set(lost)
    (full_disk / "balloon").unlink()
    assert await recorder.take(captured("later"))
    fill(full_disk)
    # There is a reserve again.
    while await recorder.take(captured("again")):
        pass
    assert recorder._gaps == {}
    await recorder.close()
    while await drainer.drain_once():
        pass
    assert await incomplete(engine) == {*lost, "again"}
    await drainer.count()
    assert_adds_up()
    assert not list(full_disk.glob("0/*.seg"))
    assert not list(full_disk.glob("0/*.open"))


async def test_a_reserve_that_somebody_removed_takes_no_mark(full_disk: Path) -> None:
    recorder = Recorder(full_disk, segment_bytes=2**20)
    assert await recorder.take(captured("whole"))
    fill(full_disk)
    for reserve in full_disk.glob("0/*.open"):
        if not reserve.stat().st_size:
            reserve.unlink()
    fill(full_disk)
    while await recorder.take(captured("lost")):
        pass
    assert list(recorder._gaps) == ["lost"]
    (full_disk / "balloon").unlink()
    assert await recorder.take(captured("later"))
    await recorder.close()


async def test_marks_beyond_the_reserve_wait_in_memory(
    engine: AsyncEngine, full_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "RETRY_S", 0.05)
    recorder = Recorder(full_disk, segment_bytes=2**20)
    assert await recorder.take(captured("whole"))
    fill(full_disk)
    long = "e" * 600_000
    for episode in ("1" + long, "2" + long):
        assert not await recorder.take(captured(episode))
    assert list(recorder._gaps) == ["2" + long]
    (full_disk / "balloon").unlink()

    async def told() -> bool:
        return not recorder._gaps

    assert await eventually(told)
    await recorder.close()


async def test_at_every_step_of_a_refusal_the_counts_add_up(
    tmp_path: Path, failing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []
    count = MutexValue.inc

    def counted(self: Any, amount: float) -> None:
        count(self, amount)
        steps.append(ledger())

    recorder = Recorder(tmp_path, segment_bytes=2**20)
    failing("write", "ftruncate")
    before = ledger()
    monkeypatch.setattr(MutexValue, "inc", counted)
    assert not await recorder.take(captured("e"))
    await recorder.close()
    assert steps
    for step in steps:
        recorded, dropped = (
            step[name] - before[name] for name in ("pawl_records_total", DROPPED_TOTAL)
        )
        assert recorded == dropped
    assert steps[-1][DROPPED_TOTAL] == before[DROPPED_TOTAL] + 1


async def test_a_worker_starts_on_a_full_disk_and_writes_once_there_is_room(
    small_disk: Path,
) -> None:
    fillers = [small_disk / name for name in ("w", "x", "y", "z")]
    for filler in fillers:
        filler.write_bytes(b"")
    recorder = Recorder(small_disk, segment_bytes=2**20)
    assert not await recorder.take(captured("e"))
    for filler in fillers:
        filler.unlink()
    assert await recorder.take(captured("e"))
    await recorder.close()
