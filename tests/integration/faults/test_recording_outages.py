"""A disk that stays full, and a worker that is killed: no episode passes for a complete one."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.ingester import drain as draining
from proxy.ingester.drain import Drainer, RecordingOutages
from proxy.spool import recorder as recording
from proxy.spool import writer as segment_writer
from proxy.spool.outages import OUTAGE, OutageFile, read_outage
from proxy.spool.recorder import Recorder
from store.database import make_engine
from tests.integration.faults.spool.test_full_spool import fill, full_disk, incomplete
from tests.integration.faults.test_failing_disk import failing
from tests.support.faults.counters import assert_adds_up
from tests.support.records import captured
from tests.support.waiting import eventually

__all__ = ["failing", "full_disk"]

# The reserve of these workers has room for the marks of about a hundred episodes.
RESERVE = 8192
WORKER = """
import asyncio, sys, time
from pathlib import Path
from proxy.spool import writer as segment_writer
from proxy.spool.recorder import Recorder
from tests.support.records import captured

segment_writer.RESERVE_BYTES = int(sys.argv[2])

async def main() -> None:
    recorder = Recorder(Path(sys.argv[1]), segment_bytes=2**20)
    while episode := (await asyncio.to_thread(sys.stdin.readline)).strip():
        print(await recorder.take(captured(episode, started_at=time.time())), flush=True)
    await recorder.close()

asyncio.run(main())
"""


class Worker:
    """A recorder in a process of its own, which can be killed."""

    def __init__(self, disk: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(disk), str(RESERVE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    def records(self, episode: str) -> bool:
        """Whether a call's record is durable; its client was answered in any case."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{episode}\n")
        self._process.stdin.flush()
        while (said := self._process.stdout.readline().strip()) not in ("True", "False"):
            assert said or self._process.poll() is None
        return said == "True"

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate()

    def stop(self) -> None:
        self._process.communicate("\n", timeout=30)


@contextmanager
def working(disk: Path) -> Iterator[Worker]:
    worker = Worker(disk)
    try:
        yield worker
    finally:
        worker.kill()


async def drain(engine: AsyncEngine, disk: Path) -> None:
    drainer = Drainer(disk, lambda: engine, batch=100)
    while await drainer.drain_once():
        pass


def lapsing(disk: Path, folder: str = "0") -> bool:
    """Whether an outage lasts: no mark of an episode finds room in the reserve any more."""
    outage = read_outage(disk / folder / OUTAGE).outage
    return outage is not None and outage.until is None


@pytest.mark.timeout(600)
async def test_what_a_killed_worker_had_only_in_memory_is_set_aside(
    engine: AsyncEngine, full_disk: Path
) -> None:
    with working(full_disk) as worker:
        assert worker.records("cut short")
        assert worker.records("elsewhere")
        fill(full_disk)
        while not lapsing(full_disk):
            worker.records("another")
        assert not worker.records("cut short")
        worker.kill()
    (full_disk / "balloon").unlink()
    await drain(engine, full_disk)
    # Whose record was lost is not known any more; both were under way.
    assert {"cut short", "elsewhere"} <= await incomplete(engine)


@pytest.mark.timeout(600)
async def test_a_worker_that_starts_on_a_full_disk_and_is_killed_leaves_its_mark(
    engine: AsyncEngine, full_disk: Path
) -> None:
    with working(full_disk) as worker:
        assert worker.records("cut short")
        fill(full_disk)
        worker.kill()
    with working(full_disk) as worker:
        assert not worker.records("cut short")
        worker.kill()
    (full_disk / "balloon").unlink()
    await drain(engine, full_disk)
    assert "cut short" in await incomplete(engine)


async def stored_outages(engine: AsyncEngine) -> int:
    async with engine.connect() as connection:
        return int((await connection.execute(text("SELECT count(*) FROM lapses"))).scalar_one())


@pytest.fixture
async def recorder(full_disk: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """A worker's, whose disk is full, and whose reserve is used up."""
    monkeypatch.setattr(segment_writer, "RESERVE_BYTES", RESERVE)
    monkeypatch.setattr(recording, "RETRY_S", 0.05)
    recorder = recorder_on(full_disk)
    assert await take(recorder, "whole")
    fill(full_disk)
    while not lapsing(full_disk):
        await take(recorder, "another")
    return recorder


def recorder_on(disk: Path) -> Recorder:
    return Recorder(disk, segment_bytes=2**20)


async def take(recorder: Recorder, episode: str) -> bool:
    return await recorder.take(captured(episode, started_at=time.time()))


async def ended(disk: Path) -> bool:
    return not lapsing(disk)


async def test_a_worker_that_lives_names_all_and_leaves_no_outage(
    engine: AsyncEngine, full_disk: Path, recorder: Recorder
) -> None:
    assert not await take(recorder, "cut short")
    await drain(engine, full_disk)
    # Others are not set aside for what may yet be named.
    assert await stored_outages(engine) == 0
    (full_disk / "balloon").unlink()
    assert await eventually(lambda: ended(full_disk))
    await recorder.close()
    await drain(engine, full_disk)
    assert await stored_outages(engine) == 0
    assert await incomplete(engine) == {"another", "cut short"}
    assert_adds_up()


async def test_more_episodes_than_are_remembered_are_a_outage(
    engine: AsyncEngine, full_disk: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "MOST_GAPS", 1)
    for episode in ("one", "two"):
        assert not await take(recorder, episode)
    (full_disk / "balloon").unlink()
    assert await take(recorder, "later")
    assert await eventually(lambda: ended(full_disk))
    await recorder.close()
    await drain(engine, full_disk)
    assert {"whole", "later"} <= await incomplete(engine)
    assert await stored_outages(engine) == 1
    assert_adds_up()


async def test_a_outage_that_lasts_is_told_while_the_disk_is_full(
    engine: AsyncEngine, full_disk: Path, recorder: Recorder
) -> None:
    assert not await take(recorder, "cut short")
    # Before the drain, which deletes segments: the disk is not full after that.
    telling = RecordingOutages(full_disk, patience_s=0.0)
    await telling.store(engine)
    assert await stored_outages(engine) == 1
    assert telling.lasts_s > 0
    await drain(engine, full_disk)
    assert "whole" in await incomplete(engine)
    (full_disk / "balloon").unlink()
    await recorder.close()


async def test_a_worker_that_stops_on_a_full_disk_leaves_its_mark(
    engine: AsyncEngine, full_disk: Path, recorder: Recorder
) -> None:
    assert not await take(recorder, "cut short")
    await recorder.close()
    (full_disk / "balloon").unlink()
    await drain(engine, full_disk)
    assert "whole" in await incomplete(engine)


async def test_a_outage_waits_for_the_database_and_is_told_once(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    """Of a worker that is gone, and whose place no other takes."""
    worker = recorder_on(tmp_path)
    assert await take(worker, "cut short")
    await worker.close()
    OutageFile(tmp_path / "0").begin(time.time())
    away = make_engine("postgresql://nobody@127.0.0.1:1/nothing")
    with pytest.raises(OSError, match="Connect call failed"):
        await RecordingOutages(tmp_path).store(away)
    await away.dispose()
    assert not lapsing(tmp_path)
    await drain(engine, tmp_path)
    assert await incomplete(engine) == {"cut short"}
    assert read_outage(tmp_path / "0" / OUTAGE).not_stored is None
    assert await stored_outages(engine) == 1


async def test_a_outage_that_cannot_be_noted_is_told_again(
    engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = recorder_on(tmp_path)
    assert await take(worker, "cut short")
    await worker.close()
    file = OutageFile(tmp_path / "0")
    file.begin(time.time())
    file.end(time.time(), named=False)
    telling = RecordingOutages(tmp_path)

    def refuse(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(draining, "note_stored", refuse)
    await telling.store(engine)
    assert telling.trouble
    assert await stored_outages(engine) == 1
    assert read_outage(tmp_path / "0" / OUTAGE).not_stored is not None


async def test_where_the_mark_fails_too_the_episodes_are_remembered(
    full_disk: Path, recorder: Recorder, failing: Any
) -> None:
    (full_disk / "balloon").unlink()
    assert await eventually(lambda: ended(full_disk))
    failing("write", "ftruncate", "pwrite")
    assert not await take(recorder, "cut short")
    assert list(recorder._gaps) == ["cut short"]
    assert not lapsing(full_disk)
    await recorder.close()
