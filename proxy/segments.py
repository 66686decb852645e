"""The spool's file format (pure): frames that can be found again after damage.

    | magic | mark | number | length | crc32(payload) | crc32(all before it) | payload |

All numbers are u32, little-endian. `magic` and `mark` (random, one a process) make a frame's
beginning findable: where bytes are damaged, reading goes on at the next one. A client cannot plant
a beginning in a body of its own, because it does not know the mark; the segment's name tells it to
the reader. The header has a checksum of its own, so that the length of a frame whose payload is
damaged can be trusted. `number` counts frames: it says how many are missing in a damaged stretch.

Frames of Pawl before this format (`u32 length | u32 crc32(payload) | payload`) are read as well.
"""

import os
import struct
from collections.abc import Iterator
from itertools import count
from typing import Final, NamedTuple
from zlib import crc32

import msgspec

from proxy.capture import Captured, Frame, Gap
from store.records import FeedbackRecord

# As a length in the format before, it is one that no frame ever had.
MAGIC: Final = b"\xf7PW\xfe"
MARK: Final = os.urandom(8)
_HEAD: Final = struct.Struct("<12sIIII")
HEAD_BYTES: Final = _HEAD.size
_CHECK: Final = struct.Struct("<I")
_FIELDS: Final = struct.Struct("<12sIII")
NUMBERS: Final = 2**32
# The header of the format before.
HEADER: Final = struct.Struct("<II")
PIECE: Final = 5000
# A header of which so many of the first bytes are right was one.
ALIKE: Final = 6

_SYNC: Final = MAGIC + MARK
_numbers: Final = count()
_encoder: Final = msgspec.msgpack.Encoder()
# Structs that are arrays on the wire cannot share a union with one that is a map.
_captured: Final[msgspec.msgpack.Decoder[Captured | Gap]] = msgspec.msgpack.Decoder(Captured | Gap)
_feedback: Final = msgspec.msgpack.Decoder(FeedbackRecord)
ARRAYS: Final = range(0x90, 0xA0)
LONG_ARRAYS: Final = (0xDC, 0xDD)


class Piece(NamedTuple):
    """One frame of a segment, or a stretch of it that is damaged.

    `data` is the payload, or the damaged bytes, and begins at `begin`; the piece, header included,
    goes from `start` to `end`. `records` says how many are in it: of a damaged stretch at least
    one, where it cannot be known, and none where it is known to be junk between frames. `number`
    is that of the next frame (None: not known), `damage` what is wrong ("": nothing).
    """

    start: int
    begin: int
    end: int
    data: bytes
    records: int
    number: int | None
    damage: str


class _Head(NamedTuple):
    """Where a frame's payload is; `number` is None in the format before."""

    begin: int
    end: int
    checksum: int
    number: int | None
    mark: bytes


def encode_frame(record: Frame) -> bytes:
    """Return one record as a frame; a process's frames are numbered as they are made."""
    payload = _encoder.encode(record)
    fields = _FIELDS.pack(_SYNC, next(_numbers) % NUMBERS, len(payload), _checksum(payload))
    return fields + _CHECK.pack(crc32(fields)) + payload


def _checksum(payload: bytes) -> int:
    """CRC-32, in pieces for which zlib does not let other threads run (it does from 5 KB on)."""
    checksum = crc32(payload[:PIECE])
    for start in range(PIECE, len(payload), PIECE):
        checksum = crc32(payload[start : start + PIECE], checksum)
    return checksum


def read_frames(data: bytes, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield the whole payloads from `offset` on, each with the offset at which its frame ends."""
    for piece in read_pieces(data, offset, ended=True):
        if not piece.damage:
            yield piece.end, piece.data


def read_pieces(
    data: bytes,
    at: int = 0,
    *,
    base: int = 0,
    mark: bytes | None = None,
    number: int | None = None,
    ended: bool = False,
) -> Iterator[Piece]:
    """Yield what `data` holds from `at` on, where a piece begins; it is at `base` in its segment.

    `number` is that of the frame at `at`, and `mark` the segment's, where they are known. `ended`
    says that nothing will ever follow `data`: what is not whole is damaged then, and not a frame
    that is still being written. Otherwise reading ends before the first piece of which the end
    cannot be told yet, so that a piece is the same however much could be read of what follows it.
    """
    while at < len(data):
        head = _head(data, at, mark) or _head_before(data, at)
        known = head is not None and head.number is not None
        if head is not None and known:
            number, mark = head.number, head.mark
        if head is not None and head.end <= len(data):
            payload = data[head.begin : head.end]
            if crc32(payload) == head.checksum:
                number = _added(number, known)
                yield Piece(base + at, base + head.begin, base + head.end, payload, 1, number, "")
                at = head.end
                continue
        end = _end_of_damage(data, at, head, mark, ended)
        if end is None:
            return
        following = _head(data, end, mark)
        if following is None and not ended and 0 < len(data) - end < HEAD_BYTES:
            return
        records = max(_lost(number, following, end - at), known)
        number = _added(number, records)
        damage = f"{end - at} damaged bytes at {base + at}"
        if end == len(data) and not (head is not None and known and head.end == end):
            damage = f"a torn or damaged frame of {end - at} bytes at {base + at}"
        yield Piece(base + at, base + at, base + end, data[at:end], records, number, damage)
        at = end


def _added(number: int | None, records: int) -> int | None:
    return None if number is None else (number + records) % NUMBERS


def _head(data: bytes, at: int, mark: bytes | None) -> _Head | None:
    """The header at `at`; None if there is none that is whole, and of the segment's own mark."""
    if not data.startswith(MAGIC, at) or len(data) - at < HEAD_BYTES:
        return None
    sync, number, length, checksum, check = _HEAD.unpack_from(data, at)
    if crc32(data[at : at + _FIELDS.size]) != check or mark not in (None, sync[len(MAGIC) :]):
        return None
    begin = at + HEAD_BYTES
    return _Head(begin, begin + length, checksum, number, sync[len(MAGIC) :])


def _head_before(data: bytes, at: int) -> _Head | None:
    """What would be a header in the format before; no frame was empty (zeros would be one)."""
    if len(data) - at < HEADER.size:
        return None
    length, checksum = HEADER.unpack_from(data, at)
    begin = at + HEADER.size
    return _Head(begin, begin + length, checksum, None, b"") if length else None


def _end_of_damage(
    data: bytes, at: int, head: _Head | None, mark: bytes | None, ended: bool
) -> int | None:
    """Where the damaged stretch that begins at `at` ends; None if that cannot be told yet."""
    known = head is not None and head.number is not None
    if head is not None and head.end <= len(data):
        if known and _began(data, head.end, mark):
            return head.end
        if not known and _frame_at(data, head.end, mark, ended):
            return head.end
    elif known and not ended:
        return None
    # Without a mark only what is surely not being written may be searched: a client can plant
    # a beginning in a body, and must not have it found in a frame that is not whole yet.
    found = _next(data, at + 1, mark) if ended or mark is not None else -1
    if found < 0:
        return len(data) if ended else None
    return found


def _began(data: bytes, at: int, mark: bytes | None) -> bool:
    """Whether a frame began at `at`, though its header may be damaged, or not be all there yet."""
    sync = MAGIC + (mark or b"")
    there = data[at : at + len(sync)]
    return not there or sum(map(bytes.__eq__, _each(there), _each(sync))) >= min(ALIKE, len(there))


def _each(data: bytes) -> Iterator[bytes]:
    return (data[at : at + 1] for at in range(len(data)))


def _frame_at(data: bytes, at: int, mark: bytes | None, ended: bool) -> bool:
    """Whether a whole frame is at `at`, or the end of it all."""
    if at == len(data):
        return ended
    head = _head(data, at, mark) or _head_before(data, at)
    if head is None or head.end > len(data):
        return False
    return crc32(data[head.begin : head.end]) == head.checksum


def _next(data: bytes, at: int, mark: bytes | None) -> int:
    """The next beginning of a frame from `at` on; -1 if there is none."""
    if mark is not None:
        return data.find(MAGIC + mark, at)
    found = data.find(MAGIC, at)
    while found >= 0 and _head(data, found, None) is None:
        found = data.find(MAGIC, found + 1)
    return found


def _lost(number: int | None, following: _Head | None, size: int) -> int:
    """How many records a damaged stretch of `size` bytes held, by what comes after it.

    At least one where that is not known. A count that the stretch has no room for is not believed.
    """
    if number is None or following is None or following.number is None:
        return 1
    lost = (following.number - number) % NUMBERS
    return lost if lost * HEAD_BYTES <= size else 1


def decode_payload(payload: bytes) -> Frame:
    """Return the record in a payload.

    Raises:
        msgspec.DecodeError: it is none of ours (a newer or older Pawl wrote it).
    """
    first = payload[0] if payload else 0
    if first in ARRAYS or first in LONG_ARRAYS:
        return _captured.decode(payload)
    return _feedback.decode(payload)
