"""What a writer of segments marks of records that it lost."""

import shutil
from pathlib import Path

import pytest

from proxy.errors import SpoolInUse
from proxy.spool import writer as segment_writer
from proxy.spool.folders import Home, take_home
from proxy.spool.outages import OUTAGE, RecordingOutage, read_outage
from proxy.spool.writer import SegmentWriter


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
    home = Home(tmp_path)
    return SegmentWriter(lambda: home, home, segment_bytes=2**20)


def outage_in(folder: Path) -> RecordingOutage | None:
    file = folder / OUTAGE
    return read_outage(file).not_stored if file.exists() else None


def test_outage_has_earlier_losses_that_could_not_be_marked(
    writer: SegmentWriter, clock: Clock, tmp_path: Path
) -> None:
    (tmp_path / OUTAGE).unlink()
    writer.begin_outage()
    assert outage_in(tmp_path) is None
    clock.now = 200.0
    writer.begin_outage()
    found = outage_in(tmp_path)
    assert found is not None
    assert (found.since, found.until) == (100.0, None)


def test_named_losses_are_in_no_later_outage(
    writer: SegmentWriter, clock: Clock, tmp_path: Path
) -> None:
    (tmp_path / OUTAGE).unlink()
    writer.begin_outage()
    assert writer.append(b"x")
    writer.end_outage(named=True)
    assert outage_in(tmp_path) is None
    clock.now = 200.0
    writer.begin_outage()
    found = outage_in(tmp_path)
    assert found is not None
    assert found.since == 200.0


def test_losses_without_a_mark_or_a_name_become_an_outage(
    writer: SegmentWriter, clock: Clock, tmp_path: Path
) -> None:
    (tmp_path / OUTAGE).unlink()
    writer.begin_outage()
    clock.now = 200.0
    assert writer.append(b"x")
    writer.end_outage(named=False)
    found = outage_in(tmp_path)
    assert found is not None
    assert (found.since, found.until) == (100.0, 200.0)


@pytest.mark.parametrize("replaced", [False, True])
def test_removed_folder_is_made_and_taken_again(tmp_path: Path, replaced: bool) -> None:
    folder = tmp_path / "spool" / "0"
    writer = SegmentWriter(lambda: take_home(tmp_path / "spool"), Home(folder), segment_bytes=64)
    assert writer.append(b"x")
    shutil.rmtree(tmp_path / "spool")
    if replaced:
        folder.mkdir(parents=True)
    assert writer.append(b"y" * 64)
    assert writer.append(b"z")
    assert sorted(path.stat().st_size for path in folder.glob("*_*")) == [0, 1, 64]
    with pytest.raises(SpoolInUse):
        Home(folder)
    # What tells of losses is there again too.
    assert writer.mark(b"m")
    writer.begin_outage()
    assert outage_in(folder) is not None
    writer.release()
    Home(folder).release()


def test_outage_lasts_on_when_its_folder_is_removed(clock: Clock, tmp_path: Path) -> None:
    folder = tmp_path / "0"
    writer = SegmentWriter(lambda: Home(folder), Home(folder), segment_bytes=64)
    writer.begin_outage()
    clock.now = 200.0
    shutil.rmtree(folder)
    assert writer.append(b"y")
    writer.end_outage(named=False)
    found = outage_in(folder)
    assert found is not None
    assert (found.since, found.until) == (100.0, 200.0)
    writer.release()
