"""The mark of lost records: whole or as it was before, never shorter than the truth; its writer."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.errors import SpoolInUse
from proxy.spool import writer as segment_writer
from proxy.spool.folders import WorkerFolder, take_worker_folder
from proxy.spool.outages import (
    OUTAGE,
    PAGE_BYTES,
    PAGES,
    OutageFile,
    mark_outage_stored,
    parse_state,
    read_outage,
)
from proxy.spool.writer import SegmentWriter


def size(folder: Path) -> int:
    return (folder / OUTAGE).stat().st_size


def span(outage: Any) -> tuple[float, float | None]:
    return outage.since, outage.until


def test_recording_outage_begins_once_and_ends(tmp_path: Path) -> None:
    file = OutageFile(tmp_path)
    assert read_outage(tmp_path / OUTAGE).unstored is None
    assert file.mark_records_lost_from(10.0)
    assert not file.mark_records_lost_from(11.0)
    lasting = read_outage(tmp_path / OUTAGE).unstored
    assert span(lasting) == (10.0, None)
    ended = file.mark_records_lost_until(12.0, named=False)
    assert ended == lasting._replace(until=12.0)
    assert read_outage(tmp_path / OUTAGE).unstored == ended
    assert file.mark_records_lost_until(13.0, named=False) is None
    assert size(tmp_path) == PAGE_BYTES * PAGES


def test_recording_outage_that_lost_only_named_episodes_is_discarded(tmp_path: Path) -> None:
    file = OutageFile(tmp_path)
    file.mark_records_lost_from(10.0)
    assert file.mark_records_lost_until(12.0, named=True) is None
    assert read_outage(tmp_path / OUTAGE).unstored is None


def test_stored_outage_makes_room_for_the_next(tmp_path: Path) -> None:
    file = OutageFile(tmp_path)
    file.mark_records_lost_from(10.0)
    first = file.mark_records_lost_until(12.0, named=False)
    assert first is not None
    mark_outage_stored(tmp_path / OUTAGE, first)
    assert read_outage(tmp_path / OUTAGE).unstored is None
    file.mark_records_lost_from(20.0)
    second = read_outage(tmp_path / OUTAGE).unstored
    assert second is not None
    assert (second.id != first.id, second.since) == (True, 20.0)


def test_unstored_outage_is_extended_by_the_next_and_not_withdrawn(tmp_path: Path) -> None:
    file = OutageFile(tmp_path)
    file.mark_records_lost_from(10.0)
    first = file.mark_records_lost_until(12.0, named=False)
    file.mark_records_lost_from(20.0)
    both = file.mark_records_lost_until(21.0, named=True)
    assert first is not None
    assert both == first._replace(until=21.0)


def test_outage_of_a_killed_worker_is_not_withdrawn(tmp_path: Path) -> None:
    OutageFile(tmp_path).mark_records_lost_from(10.0)
    file = OutageFile(tmp_path)
    assert file.is_lasting
    assert span(file.mark_records_lost_until(30.0, named=True)) == (10.0, 30.0)


def test_clock_that_is_set_back_makes_the_outage_longer(tmp_path: Path) -> None:
    file = OutageFile(tmp_path)
    file.mark_records_lost_from(10.0)
    file.mark_records_lost_from(90.0)
    assert file.mark_records_lost_from(5.0)
    assert span(file.mark_records_lost_until(6.0, named=False)) == (5.0, 90.0)


@given(cut=st.integers(0, 60), ending=st.booleans())
def test_torn_write_of_the_outage_file_leaves_its_previous_state(
    tmp_path_factory: pytest.TempPathFactory, cut: int, ending: bool
) -> None:
    folder = tmp_path_factory.mktemp("torn")
    file = OutageFile(folder)
    if ending:
        file.mark_records_lost_from(10.0)
    before = (folder / OUTAGE).read_bytes()
    state = parse_state(before)
    if ending:
        file.mark_records_lost_until(12.0, named=False)
    else:
        file.mark_records_lost_from(10.0)
    after = (folder / OUTAGE).read_bytes()
    changed = [at for at in range(len(after)) if before[at] != after[at]]
    torn = after[: changed[0] + min(cut, len(changed) - 1)]
    assert parse_state(torn + before[len(torn) :]).outage == state.outage


@given(st.binary(max_size=3 * PAGE_BYTES))
def test_foreign_bytes_in_the_outage_file_are_no_outage(data: bytes) -> None:
    assert parse_state(data) == (0, None, None)


def test_failed_write_of_the_outage_file_changes_no_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = OutageFile(tmp_path)
    file.mark_records_lost_from(10.0)
    lasting = read_outage(tmp_path / OUTAGE).outage

    def refuse(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse)
        with pytest.raises(OSError, match="Input/output"):
            file.mark_records_lost_until(12.0, named=False)
    assert read_outage(tmp_path / OUTAGE).outage == lasting
    assert span(file.mark_records_lost_until(13.0, named=False)) == (10.0, 13.0)


def test_truncated_outage_file_is_extended_and_keeps_its_outage(tmp_path: Path) -> None:
    OutageFile(tmp_path).mark_records_lost_from(10.0)
    os.truncate(tmp_path / OUTAGE, 2 * PAGE_BYTES)
    assert OutageFile(tmp_path).is_lasting
    assert size(tmp_path) == PAGE_BYTES * PAGES


def test_mark_of_an_outage_fails_if_its_file_was_removed(tmp_path: Path) -> None:
    file = OutageFile(tmp_path)
    (tmp_path / OUTAGE).unlink()
    with pytest.raises(FileNotFoundError, match="removed"):
        file.mark_records_lost_from(10.0)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(segment_writer, "time", clock)
    return clock


@pytest.fixture
def writer(tmp_path: Path) -> SegmentWriter:
    home = WorkerFolder(tmp_path)
    return SegmentWriter(lambda: home, home, segment_bytes=2**20)


def outage_in(folder: Path) -> tuple[float, float | None] | None:
    """When the outage that is marked in a folder began and ended."""
    file = folder / OUTAGE
    found = read_outage(file).unstored if file.exists() else None
    return None if found is None else (found.since, found.until)


@pytest.fixture
def unmarked(writer: SegmentWriter, clock: Clock, tmp_path: Path) -> SegmentWriter:
    """A writer that lost records at 100 and could not mark it; it is 200 now."""
    (tmp_path / OUTAGE).unlink()
    writer.begin_outage()
    assert outage_in(tmp_path) is None
    clock.now = 200.0
    return writer


def test_recording_outage_begins_with_earlier_unmarked_losses_of_records(
    unmarked: SegmentWriter, tmp_path: Path
) -> None:
    unmarked.begin_outage()
    assert outage_in(tmp_path) == (100.0, None)


def test_losses_of_named_episodes_are_in_no_later_outage(
    unmarked: SegmentWriter, tmp_path: Path
) -> None:
    assert unmarked.append(b"x")
    unmarked.end_outage(named=True)
    assert outage_in(tmp_path) is None
    unmarked.begin_outage()
    assert outage_in(tmp_path) == (200.0, None)


def test_lost_records_without_a_mark_or_a_named_episode_become_an_outage(
    unmarked: SegmentWriter, tmp_path: Path
) -> None:
    assert unmarked.append(b"x")
    unmarked.end_outage(named=False)
    assert outage_in(tmp_path) == (100.0, 200.0)


@pytest.mark.parametrize("replaced", [False, True])
def test_removed_spool_folder_is_made_and_locked_again(tmp_path: Path, replaced: bool) -> None:
    folder = tmp_path / "spool" / "0"
    writer = SegmentWriter(
        lambda: take_worker_folder(tmp_path / "spool"), WorkerFolder(folder), segment_bytes=64
    )
    assert writer.append(b"x")
    shutil.rmtree(tmp_path / "spool")
    if replaced:
        folder.mkdir(parents=True)
    assert writer.append(b"y" * 64)
    assert writer.append(b"z")
    assert sorted(path.stat().st_size for path in folder.glob("*_*")) == [0, 1, 64]
    with pytest.raises(SpoolInUse):
        WorkerFolder(folder)
    # What tells of losses is there again too.
    assert writer.append_to_reserve(b"m")
    writer.begin_outage()
    assert outage_in(folder) is not None
    writer.release()
    WorkerFolder(folder).release()


def test_recording_outage_lasts_on_when_its_spool_folder_is_removed(
    clock: Clock, tmp_path: Path
) -> None:
    folder = tmp_path / "0"
    writer = SegmentWriter(lambda: WorkerFolder(folder), WorkerFolder(folder), segment_bytes=64)
    writer.begin_outage()
    clock.now = 200.0
    shutil.rmtree(folder)
    assert writer.append(b"y")
    writer.end_outage(named=False)
    assert outage_in(folder) == (100.0, 200.0)
    writer.release()
