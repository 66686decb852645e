"""The mark of fixed size: in place, whole or as it was before, and never shorter than the truth."""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.spool.outages import (
    OUTAGE,
    PAGE,
    PAGES,
    OutageFile,
    note_stored,
    parse_state,
    read_outage,
)


def size(folder: Path) -> int:
    return (folder / OUTAGE).stat().st_size


def test_outage_begins_once_and_ends(tmp_path: Path) -> None:
    file = OutageFile(tmp_path)
    assert read_outage(tmp_path / OUTAGE).not_stored is None
    assert file.begin(10.0)
    assert not file.begin(11.0)
    lasting = read_outage(tmp_path / OUTAGE).not_stored
    assert lasting is not None
    assert (lasting.since, lasting.until) == (10.0, None)
    ended = file.end(12.0, named=False)
    assert ended == lasting._replace(until=12.0)
    assert read_outage(tmp_path / OUTAGE).not_stored == ended
    assert file.end(13.0, named=False) is None
    assert size(tmp_path) == PAGE * PAGES


def test_outage_whose_episodes_are_all_named_is_none(tmp_path: Path) -> None:
    file = OutageFile(tmp_path)
    file.begin(10.0)
    assert file.end(12.0, named=True) is None
    assert read_outage(tmp_path / OUTAGE).not_stored is None


def test_stored_outage_makes_room_for_the_next(tmp_path: Path) -> None:
    file = OutageFile(tmp_path)
    file.begin(10.0)
    first = file.end(12.0, named=False)
    assert first is not None
    note_stored(tmp_path / OUTAGE, first)
    assert read_outage(tmp_path / OUTAGE).not_stored is None
    file.begin(20.0)
    second = read_outage(tmp_path / OUTAGE).not_stored
    assert second is not None
    assert (second.id != first.id, second.since) == (True, 20.0)


def test_outage_that_is_not_stored_takes_in_the_next_and_is_not_withdrawn(tmp_path: Path) -> None:
    file = OutageFile(tmp_path)
    file.begin(10.0)
    first = file.end(12.0, named=False)
    file.begin(20.0)
    both = file.end(21.0, named=True)
    assert first is not None
    assert both == first._replace(until=21.0)


def test_outage_of_a_killed_worker_is_not_withdrawn(tmp_path: Path) -> None:
    OutageFile(tmp_path).begin(10.0)
    file = OutageFile(tmp_path)
    assert file.lasts
    ended = file.end(30.0, named=True)
    assert ended is not None
    assert (ended.since, ended.until) == (10.0, 30.0)


def test_clock_that_is_set_back_makes_the_outage_longer(tmp_path: Path) -> None:
    file = OutageFile(tmp_path)
    file.begin(10.0)
    file.begin(90.0)
    assert file.begin(5.0)
    ended = file.end(6.0, named=False)
    assert ended is not None
    assert (ended.since, ended.until) == (5.0, 90.0)


@given(cut=st.integers(0, 60), ending=st.booleans())
def test_torn_write_leaves_the_state_before(
    tmp_path_factory: pytest.TempPathFactory, cut: int, ending: bool
) -> None:
    folder = tmp_path_factory.mktemp("torn")
    file = OutageFile(folder)
    if ending:
        file.begin(10.0)
    before = (folder / OUTAGE).read_bytes()
    state = parse_state(before)
    if ending:
        file.end(12.0, named=False)
    else:
        file.begin(10.0)
    after = (folder / OUTAGE).read_bytes()
    changed = [at for at in range(len(after)) if before[at] != after[at]]
    torn = after[: changed[0] + min(cut, len(changed) - 1)]
    assert parse_state(torn + before[len(torn) :]).outage == state.outage


@given(st.binary(max_size=3 * PAGE))
def test_foreign_bytes_are_no_outage(data: bytes) -> None:
    assert parse_state(data) == (0, None, None)


def test_failed_write_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = OutageFile(tmp_path)
    file.begin(10.0)
    lasting = read_outage(tmp_path / OUTAGE).outage

    def refuse(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse)
        with pytest.raises(OSError, match="Input/output"):
            file.end(12.0, named=False)
    assert read_outage(tmp_path / OUTAGE).outage == lasting
    ended = file.end(13.0, named=False)
    assert ended is not None
    assert ended.until == 13.0


def test_truncated_file_is_made_whole(tmp_path: Path) -> None:
    OutageFile(tmp_path).begin(10.0)
    os.truncate(tmp_path / OUTAGE, 2 * PAGE)
    assert OutageFile(tmp_path).lasts
    assert size(tmp_path) == PAGE * PAGES


def test_removed_file_takes_no_mark(tmp_path: Path) -> None:
    file = OutageFile(tmp_path)
    (tmp_path / OUTAGE).unlink()
    with pytest.raises(FileNotFoundError, match="removed"):
        file.begin(10.0)
