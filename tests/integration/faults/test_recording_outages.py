"""Recording outages: a full disk or a killed worker lets no episode pass for complete."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from proxy.ingester import drain as draining
from proxy.ingester.drain import RecordingOutages
from proxy.spool import recorder as recording
from proxy.spool import writer as segment_writer
from proxy.spool.outages import OUTAGE, OutageFile, read_outage
from proxy.spool.recorder import Recorder
from store.database import make_engine
from tests.integration.faults.conftest import Failing, Spooled, fill
from tests.support.records import captured
from tests.support.waiting import until

# The reserve of these workers has room for the gaps of about a hundred episodes.
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
        print(await recorder.queue_call(captured(episode, started_at=time.time())), flush=True)
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
        while (line := self._process.stdout.readline().strip()) not in ("True", "False"):
            assert line or self._process.poll() is None
        return line == "True"

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def working(disk: Path) -> Iterator[Worker]:
    """Run a worker, and kill it after the block."""
    worker = Worker(disk)
    try:
        yield worker
    finally:
        worker.kill()


def has_outage(disk: Path) -> bool:
    """Whether an outage lasts: no episode's gap finds room in the reserve any more."""
    outage = read_outage(disk / "0" / OUTAGE).outage
    return outage is not None and outage.until is None


async def stored_outages(spooled: Spooled) -> int:
    async with spooled.engine.connect() as connection:
        return int(
            (await connection.execute(text("SELECT count(*) FROM recording_outages"))).scalar_one()
        )


@pytest.mark.timeout(600)
async def test_killed_workers_unwritten_gaps_quarantine_episodes_under_way(
    spooled: Spooled, full_disk: Path
) -> None:
    with working(full_disk) as worker:
        assert worker.records("cut short")
        assert worker.records("elsewhere")
        balloon = fill(full_disk)
        while not has_outage(full_disk):
            worker.records("another")
        assert not worker.records("cut short")
    balloon.unlink()
    await spooled.drain()
    # Whose record was lost is not known any more; both were under way.
    assert {"cut short", "elsewhere"} <= await spooled.incomplete()


@pytest.mark.timeout(600)
async def test_worker_killed_after_its_start_on_a_full_disk_leaves_a_recording_outage(
    spooled: Spooled, full_disk: Path
) -> None:
    with working(full_disk) as worker:
        assert worker.records("cut short")
        balloon = fill(full_disk)
    with working(full_disk) as worker:
        assert not worker.records("cut short")
    balloon.unlink()
    await spooled.drain()
    assert "cut short" in await spooled.incomplete()


def recorder_on(disk: Path) -> Recorder:
    return Recorder(disk, segment_bytes=2**20)


async def take(recorder: Recorder, episode: str) -> bool:
    return await recorder.queue_call(captured(episode, started_at=time.time()))


@pytest.fixture
async def recorder(full_disk: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """A worker's, whose disk is full, and whose reserve is used up."""
    monkeypatch.setattr(segment_writer, "RESERVE_BYTES", RESERVE)
    monkeypatch.setattr(recording, "RETRY_S", 0.05)
    recorder = recorder_on(full_disk)
    assert await take(recorder, "whole")
    fill(full_disk)
    while not has_outage(full_disk):
        await take(recorder, "another")
    return recorder


async def test_surviving_worker_names_all_incomplete_episodes_and_leaves_no_recording_outage(
    spooled: Spooled, full_disk: Path, recorder: Recorder
) -> None:
    assert not await take(recorder, "cut short")
    await spooled.drain()
    # Others are not set aside while the worker may still name the lost ones.
    assert await stored_outages(spooled) == 0
    (full_disk / "balloon").unlink()
    await until(lambda: not has_outage(full_disk))
    await recorder.close()
    await spooled.drain()
    assert await stored_outages(spooled) == 0
    assert await spooled.incomplete() == {"another", "cut short"}


async def test_too_many_gaps_to_keep_in_memory_become_a_recording_outage(
    spooled: Spooled, full_disk: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "MOST_GAPS", 1)
    for episode in ("one", "two"):
        assert not await take(recorder, episode)
    (full_disk / "balloon").unlink()
    assert await take(recorder, "later")
    await until(lambda: not has_outage(full_disk))
    await recorder.close()
    await spooled.drain()
    assert {"whole", "later"} <= await spooled.incomplete()
    assert await stored_outages(spooled) == 1


async def test_lasting_recording_outage_is_stored_while_the_disk_is_still_full(
    spooled: Spooled, full_disk: Path, recorder: Recorder
) -> None:
    assert not await take(recorder, "cut short")
    # Before the drain, which deletes segments: the disk is not full after that.
    recording_outages = RecordingOutages(full_disk, patience_s=0.0)
    await recording_outages.store(spooled.engine)
    assert await stored_outages(spooled) == 1
    assert recording_outages.lasts_s > 0
    await spooled.drain()
    assert "whole" in await spooled.incomplete()
    (full_disk / "balloon").unlink()
    await recorder.close()
    await spooled.drain()


async def test_worker_that_stops_on_a_full_disk_leaves_a_recording_outage(
    spooled: Spooled, full_disk: Path, recorder: Recorder
) -> None:
    assert not await take(recorder, "cut short")
    await recorder.close()
    (full_disk / "balloon").unlink()
    await spooled.drain()
    assert "whole" in await spooled.incomplete()


async def test_recording_outage_waits_for_the_database_and_is_stored_once(spooled: Spooled) -> None:
    """It is of a worker that is gone, and whose folder no other takes."""
    folder = spooled.folder / "0"
    worker = recorder_on(spooled.folder)
    assert await take(worker, "cut short")
    await worker.close()
    OutageFile(folder).mark_records_lost_from(time.time())
    away = make_engine("postgresql://nobody@127.0.0.1:1/nothing")
    with pytest.raises(OSError, match="Connect call failed"):
        await RecordingOutages(spooled.folder).store(away)
    await away.dispose()
    assert not has_outage(spooled.folder)
    await spooled.drain()
    assert await spooled.incomplete() == {"cut short"}
    assert read_outage(folder / OUTAGE).unstored is None
    assert await stored_outages(spooled) == 1


async def test_recording_outage_is_stored_again_if_its_file_cannot_be_marked_as_stored(
    spooled: Spooled, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = spooled.folder / "0"
    worker = recorder_on(spooled.folder)
    assert await take(worker, "cut short")
    await worker.close()
    file = OutageFile(folder)
    file.mark_records_lost_from(time.time())
    file.mark_records_lost_until(time.time(), named=False)
    recording_outages = RecordingOutages(spooled.folder)

    def refuse(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(draining, "mark_outage_stored", refuse)
    await recording_outages.store(spooled.engine)
    assert recording_outages.trouble
    assert await stored_outages(spooled) == 1
    assert read_outage(folder / OUTAGE).unstored is not None
    await spooled.drain()


async def test_gaps_stay_in_memory_if_the_recording_outage_cannot_be_written(
    full_disk: Path, recorder: Recorder, failing: Failing
) -> None:
    (full_disk / "balloon").unlink()
    await until(lambda: not has_outage(full_disk))
    failing("write", "ftruncate", "pwrite")
    assert not await take(recorder, "cut short")
    assert list(recorder._gaps) == ["cut short"]
    assert not has_outage(full_disk)
    await recorder.close()
