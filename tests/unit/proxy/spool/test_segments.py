"""A spool's segments: records come back as they were, damage costs what is damaged; the drain."""

import os
import struct
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from proxy.ingester.drain import Drainer, DrainState
from proxy.ingester.segment_reader import BEGIN, FramePlace, Segment, segment_files
from proxy.spool.segments import (
    HEAD_BYTES,
    MAGIC,
    PROCESS_MARK,
    CapturedCall,
    Piece,
    decode_payload,
    encode_frame,
    read_frames,
    read_pieces,
)
from store.database import make_engine
from store.ids import new_id
from store.records import GapRecord
from store.values.packing import pack_ids, pack_logprobs, unpack_ids, unpack_logprobs
from tests.support.records import captured, reward


def test_spooled_records_are_read_back_as_they_were_written() -> None:
    gap = GapRecord(id=new_id(), episodes=("e1", "e2"))
    records = [captured(), reward(0.5, episode="e", key="k"), gap]
    data = b"".join(encode_frame(record) for record in records)
    assert [decode_payload(payload) for _, payload in read_frames(data)] == records


@given(
    st.lists(st.integers(0, 2**31 - 1)),
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False)),
)
def test_packed_token_ids_and_logprobs_are_read_back_exactly(
    ids: list[int], logprobs: list[float]
) -> None:
    assert unpack_ids(pack_ids(ids)) == ids
    assert unpack_logprobs(pack_logprobs(logprobs)) == logprobs


FRAMES = [
    encode_frame(captured(f"e{number}", request=b"x" * (number * 37)))
    if number % 3
    else encode_frame(reward(1.0, episode=f"e{number}"))
    for number in range(8)
]
SEGMENT = b"".join(FRAMES)
STARTS = [sum(map(len, FRAMES[:number])) for number in range(len(FRAMES) + 1)]
FIRST = struct.unpack_from("<I", SEGMENT, 12)[0]


def pieces(data: bytes, *, ended: bool = True, mark: bytes | None = PROCESS_MARK) -> list[Piece]:
    """What is read of a segment from its beginning."""
    return list(read_pieces(data, mark=mark, number=FIRST if mark else None, ended=ended))


def whole(found: list[Piece]) -> list[bytes]:
    return [piece.data for piece in found if not piece.damage]


def lost(found: list[Piece]) -> int:
    return sum(piece.records for piece in found if piece.damage)


def payloads(but: set[int]) -> list[bytes]:
    return [frame[HEAD_BYTES:] for number, frame in enumerate(FRAMES) if number not in but]


def hit(position: int) -> int:
    """The frame that a byte belongs to."""
    return sum(start <= position for start in STARTS) - 1


def adjoin(found: list[Piece], data: bytes) -> None:
    """Every byte is in exactly one piece."""
    assert [piece.start for piece in found] == [0, *(piece.end for piece in found)][:-1]
    assert not found or found[-1].end == len(data)
    for piece in found:
        assert piece.data == data[piece.begin : piece.end]


@pytest.mark.parametrize("mark", [PROCESS_MARK, None], ids=["marked", "unmarked"])
@given(bits=st.sets(st.integers(0, 8 * len(SEGMENT) - 1), min_size=1, max_size=6))
def test_flipped_bits_of_a_segment_cost_only_the_records_they_are_in(
    mark: bytes | None, bits: set[int]
) -> None:
    data = bytearray(SEGMENT)
    for bit in bits:
        data[bit // 8] ^= 1 << bit % 8
    touched = {hit(bit // 8) for bit in bits}
    found = pieces(bytes(data), mark=mark)
    adjoin(found, bytes(data))
    assert whole(found) == payloads(touched)
    if mark and len(FRAMES) - 1 not in touched:
        assert lost(found) == len(touched)
    assert 1 <= lost(found) <= len(touched)


@given(st.integers(0, len(SEGMENT)), st.binary(min_size=1, max_size=200))
def test_junk_bytes_in_a_segment_cost_at_most_the_record_they_are_in(
    position: int, junk: bytes
) -> None:
    data = SEGMENT[:position] + junk + SEGMENT[position:]
    found = pieces(data)
    adjoin(found, data)
    touched = set() if position in STARTS else {hit(position)}
    assert set(payloads(touched)) <= set(whole(found))
    # Junk that is like the bytes around it may leave the record whole; and at a segment's very
    # end nothing tells it from a record that was begun.
    missing = len(FRAMES) - len(whole(found))
    assert lost(found) == missing or (missing == 0 and found[-1].damage and lost(found) == 1)


@given(st.integers(0, len(SEGMENT)), st.integers(0, len(SEGMENT)))
def test_missing_bytes_of_a_segment_cost_at_most_the_records_they_touch(
    one: int, other: int
) -> None:
    begin, end = sorted((one, other))
    data = SEGMENT[:begin] + SEGMENT[end:]
    found = pieces(data)
    adjoin(found, data)
    touched = {n for n in range(8) if STARTS[n] < end and STARTS[n + 1] > begin and begin < end}
    # What is left of two frames may be one that is whole: their beginnings are alike.
    assert set(payloads(touched)) <= set(whole(found)) <= set(payloads(set()))


@given(
    st.lists(st.sampled_from([*FRAMES, MAGIC, MAGIC + PROCESS_MARK, b"\0" * 64, b"junk"])),
    st.binary(),
)
def test_any_content_of_a_segment_is_read_without_an_error(parts: list[bytes], end: bytes) -> None:
    data = b"".join(parts) + end
    for mark in (PROCESS_MARK, None):
        adjoin(pieces(data, mark=mark), data)
        assert sum(part in FRAMES for part in parts) <= len(whole(pieces(data, mark=mark)))


@given(st.integers(0, len(SEGMENT)), st.integers(0, len(SEGMENT) - 1), st.booleans())
def test_growing_segment_reads_the_same_as_a_finished_segment(
    cut: int, flipped: int, flip: bool
) -> None:
    """The ingester counts a segment that grows, and drains it later: both see the same pieces."""
    data = bytearray(SEGMENT)
    if flip:
        data[flipped] ^= 4
    at_its_end = pieces(bytes(data))
    early = pieces(bytes(data[:cut]), ended=False)
    assert early == at_its_end[: len(early)]
    place, number = (early[-1].end, early[-1].number) if early else (0, FIRST)
    rest = list(
        read_pieces(bytes(data[place:]), base=place, mark=PROCESS_MARK, number=number, ended=True)
    )
    assert early + rest == at_its_end


def test_tail_of_a_segment_that_is_still_being_written_is_not_damage() -> None:
    for cut in range(len(SEGMENT)):
        found = pieces(SEGMENT[:cut], ended=False)
        assert [piece.end for piece in found] == [end for end in STARTS[1:] if end <= cut]
        assert not any(piece.damage for piece in found)


def test_a_client_cannot_plant_a_record_in_a_body_that_is_damaged() -> None:
    """It knows the format; it does not know the mark."""
    fields = struct.pack("<12sIII", MAGIC + b"its mark", 0, 0, 0)
    forged = encode_frame(reward(9.0, episode="mine"))[HEAD_BYTES:]
    fields = struct.pack("<12sIII", MAGIC + b"its mark", 1, len(forged), crc32(forged))
    plant = fields + struct.pack("<I", crc32(fields)) + forged
    outer = encode_frame(captured(request=plant + b"x" * 99))
    after = encode_frame(captured("after"))
    for position in range(HEAD_BYTES + 4):
        data = bytearray(outer + after)
        data[position] ^= 1
        assert whole(list(read_pieces(bytes(data), mark=PROCESS_MARK, ended=True))) == [
            after[HEAD_BYTES:]
        ]


@pytest.mark.parametrize("damaged_after", [False, True])
def test_whole_frame_is_found_within_the_length_of_a_cut_frame(damaged_after: bool) -> None:
    cut = encode_frame(captured("x" * 400))
    kept = encode_frame(captured("kept"))
    after = encode_frame(captured("after"))
    if damaged_after:
        after = bytes([after[0] ^ 1]) + after[1:]
    # The cut frame's length reaches exactly to the end of the whole one.
    found = pieces(cut[: len(cut) - len(kept)] + kept + after, mark=PROCESS_MARK)
    records = [decode_payload(data) for data in whole(found)]
    episodes = [record.episode for record in records if isinstance(record, CapturedCall)]
    assert episodes == (["kept"] if damaged_after else ["kept", "after"])
    assert [piece.records for piece in found] == [1, 1, 1]


def test_gap_with_its_id_as_bytes_is_read() -> None:
    gap = GapRecord(id=new_id(), episodes=("e1",))
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(gap))
    assert fields.count(str(gap.id)) == 1
    old = [gap.id.bytes if field == str(gap.id) else field for field in fields]
    assert decode_payload(msgspec.msgpack.encode(old)) == gap


def test_spooled_call_without_the_latest_fields_is_read() -> None:
    """They are then unknown, as before."""
    last = {
        "tool_tag": "hermes",
        "arm": "canary",
        "api_key": "0123456789abcdef",
        "trace": "00-1-2-01",
        "reply_bytes": 9,
        "lane": "a1b2",
    }
    unknown = dict.fromkeys(last) | {"reply_bytes": 0}
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(captured(**last)))
    assert fields[-len(last) :] == list(last.values())
    for missing in range(1, len(last) + 1):
        old = decode_payload(msgspec.msgpack.encode(fields[:-missing]))
        present = dict(list(last.items())[: len(last) - missing])
        assert {name: getattr(old, name) for name in last} == unknown | present


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
    assert segment.has_grown()
    [piece] = segment.pieces(BEGIN, None, sealed=True)
    assert not piece.damage
    assert not path.exists()


def test_removed_segment_is_an_error(path: Path) -> None:
    segment = Segment(path)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        segment.has_grown()


@pytest.mark.parametrize("url", [None, "postgresql://nobody@127.0.0.1:1/none"])
async def test_empty_segment_that_its_worker_deletes_is_no_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str | None
) -> None:
    path = tmp_path / "0" / "a.open"
    path.parent.mkdir()
    path.write_bytes(b"")
    engine = None if url is None else make_engine(url)
    drainer = Drainer(tmp_path, lambda: engine, batch=10)
    look = drainer._find_segments

    def deleted_after() -> None:
        look()
        path.unlink(missing_ok=True)

    monkeypatch.setattr(drainer, "_find_segments", deleted_after)
    with capture_logs() as logs:
        for _ in range(2):
            await drainer.drain_once()
            assert drainer._writer.trouble == ""
    assert logs == []


def test_reading_in_batches_is_linear_in_the_segment(path: Path) -> None:
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
        place = FramePlace(pieces[-1].end, pieces[-1].number)
    assert ends == [sum(map(len, frames[: number + 1])) for number in range(210)]
    assert not segment.has_more
    # Without a look at the last batch, each one would read all that follows it.
    assert sum(read) < 6 * sum(map(len, frames))


def test_spool_drain_stays_stuck_through_a_database_outage_until_records_move() -> None:
    now = 100.0
    progress = DrainState(lambda: now)
    assert (progress.state, progress.stuck_s) == ("moving", 0.0)
    now = 110.0
    progress.set_state("stuck", "held")
    now = 115.0
    progress.set_state("stuck", "held")
    assert (progress.stuck_s, progress.readyz_fields()["for_s"]) == (5.0, 5.0)
    # PostgreSQL goes away, and comes back: the record has been held all the time.
    progress.set_state("waiting", "away")
    now = 120.0
    assert (progress.stuck_s, progress.readyz_fields()["for_s"]) == (0.0, 5.0)
    progress.set_state("stuck", "held")
    assert (progress.stuck_s, progress.readyz_fields()["for_s"]) == (10.0, 10.0)
    progress.set_state("moving")
    now = 130.0
    assert (progress.stuck_s, progress.readyz_fields()["for_s"]) == (0.0, 10.0)
    progress.set_state("stuck", "another")
    now = 131.0
    assert progress.stuck_s == 1.0


def test_folder_that_vanishes_during_the_search_for_segments_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("access.part", "worker"):
        (tmp_path / folder).mkdir()
    segment = tmp_path / "worker" / "1_ab.open"
    segment.touch()
    scandir = os.scandir

    def gone(folder: Any) -> Any:
        if Path(folder).name == "access.part":
            raise FileNotFoundError(folder)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", gone)
    assert list(segment_files(tmp_path)) == [("1_ab", segment)]
