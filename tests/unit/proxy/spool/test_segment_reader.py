"""What the ingester reads of segments that grow, are renamed and go; and when it is stuck."""

from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from proxy.ingester.drain import Drainer, Progress
from proxy.ingester.segment_reader import BEGIN, Place, Segment
from proxy.spool.segments import encode_frame
from store.database import make_engine
from tests.support.records import captured


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "a.open"
    made.write_bytes(encode_frame(captured("e")))
    return made


@pytest.mark.parametrize("name", ["open", "stat"])
def test_segment_that_is_sealed_while_it_is_read_is_read_whole(
    path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    segment = Segment(path)
    real = getattr(Path, name)

    def renamed_before(self: Path, *args: Any, **more: Any) -> Any:
        # `exists` asks `stat` too: the rename comes after it.
        if self == path and seen.append(1) is None and len(seen) > (name == "stat"):
            monkeypatch.undo()
            path.rename(path.with_suffix(".seg"))
        return real(self, *args, **more)

    seen: list[int] = []
    monkeypatch.setattr(Path, name, renamed_before)
    assert segment.grown()
    [piece] = segment.pieces(BEGIN, None, sealed=True)
    assert not piece.damage
    assert not path.exists()


def test_removed_segment_is_an_error(path: Path) -> None:
    segment = Segment(path)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        segment.grown()


@pytest.mark.parametrize("url", [None, "postgresql://nobody@127.0.0.1:1/none"])
async def test_empty_segment_that_its_worker_deletes_is_no_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str | None
) -> None:
    path = tmp_path / "0" / "a.open"
    path.parent.mkdir()
    path.write_bytes(b"")
    engine = None if url is None else make_engine(url)
    drainer = Drainer(tmp_path, lambda: engine, batch=10)
    look = drainer._look

    def deleted_after() -> None:
        look()
        path.unlink(missing_ok=True)

    monkeypatch.setattr(drainer, "_look", deleted_after)
    with capture_logs() as logs:
        for _ in range(2):
            await drainer.drain_once()
            assert drainer._writer.trouble == ""
    assert logs == []


def test_batches_are_read_once_and_little_more_with_each(path: Path) -> None:
    # Frames of very different lengths: a batch may be shorter than the last one, or longer.
    frames = [
        encode_frame(captured(f"{number}", request=b"x" * 2 ** (number % 14)))
        for number in range(210)
    ]
    path.write_bytes(b"".join(frames))
    read: list[int] = []

    class Counting(Segment):
        def _read(self, offset: int, size: int) -> tuple[bytes, bool]:
            data, whole = super()._read(offset, size)
            read.append(len(data))
            return data, whole

    segment, place, ends = Counting(path), BEGIN, []
    while pieces := segment.pieces(place, 7, sealed=True):
        assert len(pieces) <= 7
        assert not any(piece.damage for piece in pieces)
        ends += [piece.end for piece in pieces]
        place = Place(pieces[-1].end, pieces[-1].number)
    assert ends == [sum(map(len, frames[: number + 1])) for number in range(210)]
    assert not segment.has_more
    # Without a look at the last batch, each one would read all that follows it.
    assert sum(read) < 6 * sum(map(len, frames))


def test_drain_is_stuck_until_all_records_move_also_through_an_outage() -> None:
    now = 100.0
    progress = Progress(lambda: now)
    assert (progress.state, progress.stuck_s) == ("moving", 0.0)
    now = 110.0
    progress.note("stuck", "held")
    now = 115.0
    progress.note("stuck", "held")
    assert (progress.stuck_s, progress.told()["for_s"]) == (5.0, 5.0)
    # PostgreSQL goes away, and comes back: the record has been held all the time.
    progress.note("waiting", "away")
    now = 120.0
    assert (progress.stuck_s, progress.told()["for_s"]) == (0.0, 5.0)
    progress.note("stuck", "held")
    assert (progress.stuck_s, progress.told()["for_s"]) == (10.0, 10.0)
    progress.note("moving")
    now = 130.0
    assert (progress.stuck_s, progress.told()["for_s"]) == (0.0, 10.0)
    progress.note("stuck", "another")
    now = 131.0
    assert progress.stuck_s == 1.0
