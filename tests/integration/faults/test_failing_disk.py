"""A recorder's disk that fails, hangs or is full: who waits is answered, and it recovers."""

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.values import MutexValue

from proxy.spool import recorder as recording
from proxy.spool.recorder import Recorder, Spool
from proxy.spool.segments import encode_frame
from store.records import Episode
from tests.integration.conftest import Proxy
from tests.integration.faults.conftest import Failing, Spooled, fill, mounted
from tests.support.faults.counters import assert_adds_up, ledger, until_adds_up
from tests.support.records import captured
from tests.support.waiting import PATIENCE_S, eventually, until

# What a commit needs of the disk, and what comes after one that failed.
CALLS = ["write", "fdatasync", "ftruncate", "close", "open", "fstat", "fsync", "rename", "unlink"]
DROPPED = "pawl_records_dropped_total"


def recorder_on(disk: Path) -> Recorder:
    return Recorder(disk, segment_bytes=2**20)


async def append(spool: Spool, episode: str) -> bool:
    return await asyncio.wait_for(spool.append(encode_frame(captured(episode))), 5)


@pytest.mark.parametrize("names", [[name] for name in CALLS] + [CALLS], ids="+".join)
@pytest.mark.parametrize("begun", [False, True])
async def test_spool_answers_every_append_and_recovers_after_any_disk_error(
    spooled: Spooled, failing: Failing, names: list[str], begun: bool
) -> None:
    spool = Spool(spooled.folder / "0", segment_bytes=600)
    if begun:
        assert await append(spool, "first")
    mend = failing(*names)
    durable = {f"e{number}" for number in range(3) if await append(spool, f"e{number}")}
    mend()
    assert await append(spool, "later")
    await asyncio.to_thread(spool.close)
    await spooled.drain()
    assert {"later", *durable, *(["first"] if begun else [])} <= await spooled.names()
    assert not list(spooled.folder.glob("*/*.open"))


@pytest.mark.parametrize("error", [RuntimeError("odd"), MemoryError(), ValueError("v")])
async def test_write_error_of_any_kind_fails_only_its_append(
    tmp_path: Path, failing: Failing, error: Exception
) -> None:
    spool = Spool(tmp_path / "0", segment_bytes=2**20)
    mend = failing("write", error=error)
    assert not await append(spool, "a")
    mend()
    assert await append(spool, "b")
    spool.close()


async def test_failing_commit_callback_leaves_no_append_unanswered(tmp_path: Path) -> None:
    def broken(_outcome: str, _marks: list[str]) -> None:
        raise OSError(28, "No space left on device")

    spool = Spool(tmp_path / "0", segment_bytes=2**20, on_commit=broken)
    assert await append(spool, "a")
    assert await append(spool, "b")
    spool.close()


def test_spool_closes_and_keeps_its_record_after_the_event_loop_ended(tmp_path: Path) -> None:
    async def leave() -> Spool:
        spool = Spool(tmp_path / "0", segment_bytes=2**20)
        spool.append(encode_frame(captured()))
        await asyncio.sleep(0)
        return spool

    spool = asyncio.run(leave())
    spool.close()
    assert not spool._thread.is_alive()
    assert len(list(tmp_path.glob("0/*.seg"))) == 1


async def test_hanging_disk_is_given_up_and_used_again_once_it_answers(
    tmp_path: Path, failing: Failing
) -> None:
    committed: list[tuple[str, list[str]]] = []
    answers = failing.hang("fdatasync")
    spool = Spool(
        tmp_path / "0",
        segment_bytes=2**20,
        on_commit=lambda outcome, marks: committed.append((outcome, marks)),
        patience_s=0.3,
    )
    frame = encode_frame(captured())
    first = spool.append(frame, "first")
    # Its commit has begun then; a wait of any length might let the disk be given up before.
    await asyncio.sleep(0)
    second = spool.append(frame, "second")
    assert [await asyncio.wait_for(f, 10) for f in (first, second)] == [False, False]
    # Nothing is gathered for a disk that does not answer.
    assert spool.append(frame, "third").result() is False
    assert committed == [("lost", ["first", "second"]), ("lost", ["third"])]
    answers.set()

    async def is_written() -> bool:
        return await spool.append(frame, "later")

    assert await eventually(is_written)
    # What was reported as lost is not reported again as written.
    assert [marks for outcome, marks in committed if outcome == "durable"] == [[], ["later"]]
    assert spool.commit_under_way_s() == 0
    spool.close()


async def test_spool_closes_though_its_disk_hangs(tmp_path: Path, failing: Failing) -> None:
    answers = failing.hang("fdatasync")
    spool = Spool(tmp_path / "0", segment_bytes=2**20, patience_s=0.2)
    spool.append(encode_frame(captured()))
    began = time.monotonic()
    await spool.flush()
    spool.close(within_s=0.5)
    assert time.monotonic() - began < 10
    answers.set()
    spool._thread.join(5)


async def test_episode_that_lost_a_record_is_marked_incomplete_without_a_later_call(
    spooled: Spooled, failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "RETRY_S", 0.05)
    before = ledger()[DROPPED]
    recorder = recorder_on(spooled.folder)
    assert await recorder.queue_call(captured("e", total_ms=1.0))
    mend = failing("write", "ftruncate")
    assert not await recorder.queue_call(captured("e"))
    # It tries to write the gap, again and again.
    await until(lambda: failing.refused["write"] >= 4)
    mend()

    async def is_marked() -> bool:
        await spooled.drainer.drain_once()
        return bool(await spooled.incomplete())

    assert await eventually(is_marked)
    # The attempts to write it were no records.
    assert ledger()[DROPPED] == before + 1
    await recorder.close()
    await spooled.drain()


async def test_record_that_cannot_be_encoded_is_dropped_and_counted(tmp_path: Path) -> None:
    before = ledger()[DROPPED]
    recorder = recorder_on(tmp_path)
    assert not await recorder.queue_call(captured("\ud800"))
    assert await recorder.queue_call(captured("e"))
    assert ledger()[DROPPED] == before + 1
    await recorder.close()


async def test_record_counters_add_up_at_every_step_while_the_disk_refuses_a_record(
    tmp_path: Path, failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []
    count = MutexValue.inc

    def counted(self: Any, amount: float) -> None:
        count(self, amount)
        steps.append(ledger())

    recorder = recorder_on(tmp_path)
    failing("write", "ftruncate")
    before = ledger()
    monkeypatch.setattr(MutexValue, "inc", counted)
    assert not await recorder.queue_call(captured("e"))
    await recorder.close()
    assert steps
    for step in steps:
        assert step["pawl_records_total"] - before["pawl_records_total"] == (
            step[DROPPED] - before[DROPPED]
        )
    assert steps[-1][DROPPED] == before[DROPPED] + 1


async def test_proxy_on_a_full_disk_answers_calls_refuses_feedback_and_marks_the_gap(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_fd: int, _data: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    assert (await proxy.chat(headers={"x-pawl-episode": "gap"})).status == 200
    status, body = await proxy.feedback({"value": 1, "episode": "e"})
    assert status == 507
    assert "PAWL_SPOOL_DIR" in body["error"]["message"]
    monkeypatch.undo()
    assert_adds_up()
    assert (await proxy.chat()).status == 200
    assert (await proxy.counters())[DROPPED] >= 2
    assert (await proxy.chat(headers={"x-pawl-episode": "gap"})).status == 200

    def is_marked(found: list[Episode]) -> bool:
        return any(e.key == "gap" and "lost" in (e.quarantined_reason or "") for e in found)

    await proxy.episodes(2, is_marked)
    await until_adds_up()


async def test_spool_commit_cut_off_by_a_full_disk_hides_no_later_record(
    spooled: Spooled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ingester reads whole frames of a commit that is then cut off again."""
    spool = Spool(spooled.folder / "0", segment_bytes=2**20)
    assert await append(spool, "first")
    real = os.write
    half_written, read_by_ingester = threading.Event(), threading.Event()

    def half(handle: int, data: memoryview) -> int:
        if len(data) < 2 * len(encode_frame(captured("lost"))):
            half_written.set()
            read_by_ingester.wait(PATIENCE_S)
            raise OSError(28, "No space left on device")
        return real(handle, data[: len(data) // 2])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", half)
        lost = asyncio.gather(*[spool.append(encode_frame(captured("lost"))) for _ in range(2)])
        assert await asyncio.to_thread(half_written.wait, PATIENCE_S)
        assert await spooled.drainer.drain_once() == 2
        read_by_ingester.set()
        assert await lost == [False, False]
    assert await append(spool, "later")
    await spooled.drainer.drain_once()
    assert await spooled.stored() == 3
    spool.close()
    await spooled.drain()


@pytest.mark.parametrize("frames", [20, 700])
async def test_gaps_of_lost_records_are_written_to_a_full_disk_before_the_answer(
    spooled: Spooled, full_disk: Path, frames: int
) -> None:
    before = ledger()[DROPPED]
    recorder = recorder_on(full_disk)
    assert await recorder.queue_call(captured("whole"))
    balloon = fill(full_disk)
    # The last page of the segment has room for a few.
    episodes = [f"e-{number}" for number in range(frames)]
    lost = [e for e in episodes if not await recorder.queue_call(captured(e))]
    assert len(lost) > frames // 4
    # Nothing of it is in memory: the worker may be killed now, and the disk is still full.
    assert recorder._gaps == {}
    assert ledger()[DROPPED] == before + len(lost)
    await spooled.drain()
    assert await spooled.incomplete() == set(lost)
    balloon.unlink()
    assert await recorder.queue_call(captured("later"))
    fill(full_disk)
    # There is a reserve again.
    while await recorder.queue_call(captured("again")):
        pass
    assert recorder._gaps == {}
    await recorder.close()
    await spooled.drain()
    assert await spooled.incomplete() == {*lost, "again"}
    assert not list(full_disk.glob("0/*.seg"))
    assert not list(full_disk.glob("0/*.open"))


async def test_gap_waits_in_memory_if_the_disk_reserve_was_removed(full_disk: Path) -> None:
    recorder = recorder_on(full_disk)
    assert await recorder.queue_call(captured("whole"))
    balloon = fill(full_disk)
    for reserve in full_disk.glob("0/*.open"):
        if not reserve.stat().st_size:
            reserve.unlink()
    fill(full_disk)
    while await recorder.queue_call(captured("lost")):
        pass
    assert list(recorder._gaps) == ["lost"]
    balloon.unlink()
    assert await recorder.queue_call(captured("later"))
    await recorder.close()


async def test_gaps_that_exceed_the_disk_reserve_wait_in_memory(
    full_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "RETRY_S", 0.05)
    recorder = recorder_on(full_disk)
    assert await recorder.queue_call(captured("whole"))
    balloon = fill(full_disk)
    long = "e" * 600_000
    for episode in ("1" + long, "2" + long):
        assert not await recorder.queue_call(captured(episode))
    assert list(recorder._gaps) == ["2" + long]
    balloon.unlink()
    await until(lambda: not recorder._gaps)
    await recorder.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk on which five files can be, its root among them."""
    yield from mounted(tmp_path, "size=64k,nr_inodes=5")


async def test_worker_starts_on_a_full_disk_and_writes_once_there_is_room(small_disk: Path) -> None:
    fillers = [small_disk / name for name in ("w", "x", "y", "z")]
    for filler in fillers:
        filler.write_bytes(b"")
    recorder = recorder_on(small_disk)
    assert not await recorder.queue_call(captured("e"))
    for filler in fillers:
        filler.unlink()
    assert await recorder.queue_call(captured("e"))
    await recorder.close()
