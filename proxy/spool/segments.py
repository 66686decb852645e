"""Format of the spool's segments (pure): records in frames that can be found after damage.

    | magic | mark | number | length | crc32(payload) | crc32(all before it) | payload |

A payload is a call (captured, or redacted), feedback, or a gap. A worker parses only the fields of
a call that serving needs. The ingester parses the call's bytes again with the same wire format, and
makes the database's record from them (`proxy.ingester.transcribe`).

All numbers are u32, little-endian. `magic` (4 bytes) and `mark` (8 random bytes for each process)
show where a frame begins: after damaged bytes, reading goes on at the next frame. A client cannot
fake a frame in its body, because it does not know the mark; the reader takes the mark from the
segment's name. The header has its own checksum, so that a frame's length can be trusted even if its
payload is damaged. `number` counts frames, and so tells how many were lost by damage.
"""

import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Final, NamedTuple
from zlib import crc32

import msgspec

from store.records import (
    TRAIN,
    Arm,
    CallRecord,
    CallStatus,
    Confidence,
    FeedbackRecord,
    GapRecord,
    Record,
    Split,
    ToolEvent,
)

MAGIC: Final = b"\xf7PW\xfe"
PROCESS_MARK: Final = os.urandom(8)
_HEAD: Final = struct.Struct("<12sIIII")
HEAD_BYTES: Final = _HEAD.size
_CHECK: Final = struct.Struct("<I")
_FIELDS: Final = struct.Struct("<12sIII")
# After so many frames their numbers begin again at 0.
FRAME_NUMBERS: Final = 2**32
# Most bytes whose checksum is computed at once.
CHECKSUM_BYTES: Final = 5000
# Default limit of an inflated reply, in bytes: a few deflated bytes can inflate to very many.
MOST_INFLATED: Final = 256 * 2**20
# Bytes of magic and mark that must match for a damaged header to be recognised.
MIN_ALIKE_BYTES: Final = 6


class CapturedCall(Record, frozen=True, kw_only=True, tag="captured", array_like=True):
    """One call as its worker saw it.

    `id` is the bytes of a UUIDv7. `request` is the client's body; `reply` is the upstream's, token
    ids included, deflated if `deflated` is set. `started_at` is Unix time in seconds. `provides`
    and `needs` are fingerprints (`proxy.identity.call_memory`).

    It is stored as an array: the order of the fields is part of the spool's format.
    """

    id: bytes
    episode: str
    method: str
    confidence: Confidence
    agent: str
    task: str | None
    dialect: str
    policy: str | None
    policy_version: int | None
    served_model: str | None
    wanted_ids: bool
    status: CallStatus
    http_status: int | None
    streamed: bool
    request: bytes
    reply: bytes
    deflated: bool
    provides: tuple[bytes, ...]
    needs: tuple[bytes, ...]
    retry_of: bytes | None
    retry: int
    tool_events: tuple[ToolEvent, ...]
    default_temperature: float
    started_at: float
    first_chunk_ms: float | None
    total_ms: float
    # The upstream's defaults for sampling settings that the request leaves out.
    sampling_defaults: Mapping[str, float] = {}
    split: Split = TRAIN
    # Whether the upstream may constrain tool calls by a grammar.
    tool_grammars: bool = True
    # The settings that exploration changed (`proxy.exploring`).
    explored: Mapping[str, float | None] | None = None
    # The syntax of the tool grammar (`proxy.formats.sampling`), if known.
    tool_tag: str | None = None
    arm: Arm | None = None
    # The id of the client's API key.
    api_key: str | None = None
    # The client's trace context (`proxy.identity.identify.trace_context`).
    trace: str | None = None
    # Length of the whole reply in bytes, inflated; 0: unknown.
    reply_bytes: int = 0
    # The thread of a sub-agent (`proxy.identity.identify.CallIdentity.lane`).
    lane: str | None = None

    @property
    def is_reply_cut(self) -> bool:
        """Return whether the reply was too long to keep whole: `reply` is only its beginning."""
        return not self.deflated and self.reply_bytes > len(self.reply)


# A redacted call is recorded as a `CallRecord`.
Frame = CapturedCall | CallRecord | FeedbackRecord | GapRecord


class ReplyTooLong(Exception):
    """Report that a reply is longer than the limit for reading it into memory."""


def inflate(reply: bytes, most: int = MOST_INFLATED) -> bytes:
    """Inflate a deflated reply.

    Raises:
        zlib.error: the deflated bytes are damaged.
        ReplyTooLong: the reply is longer than `most` bytes.
    """
    inflater = zlib.decompressobj()
    inflated = inflater.decompress(reply, most + 1)
    if len(inflated) > most:
        raise ReplyTooLong(
            f"the reply is longer than {most} bytes; raise PAWL_MAX_REPLY_MB, then "
            "`pawl spool --replay` stores it"
        )
    if not inflater.eof:
        raise zlib.error("the deflated reply is cut off")
    return inflated


_SYNC: Final = MAGIC + PROCESS_MARK
_numbers: Final = count()
_encoder: Final = msgspec.msgpack.Encoder()
# msgspec cannot decode a union of array-like structs and map-like structs.
_array_decoder: Final[msgspec.msgpack.Decoder[CapturedCall | GapRecord]] = msgspec.msgpack.Decoder(
    CapturedCall | GapRecord
)
_map_decoder: Final[msgspec.msgpack.Decoder[FeedbackRecord | CallRecord]] = msgspec.msgpack.Decoder(
    FeedbackRecord | CallRecord
)
# First bytes of MessagePack's arrays: fixarray, array 16 and array 32.
ARRAYS: Final = range(0x90, 0xA0)
LONG_ARRAYS: Final = (0xDC, 0xDD)


class Piece(NamedTuple):
    """One frame of a segment, or a damaged stretch; offsets are within the segment.

    `data` is the payload, or the damaged bytes. The piece begins at `start`, its data at `begin`.
    `records` counts the records in it: in a damaged stretch 0 if it is known to be junk between
    frames, and 1 if the count is unknown. `number` is the next frame's, None if unknown. `damage`
    describes the damage; it is empty if there is none.
    """

    start: int
    begin: int
    end: int
    data: bytes
    records: int
    number: int | None
    damage: str


class _Head(msgspec.Struct, frozen=True, gc=False):
    """A frame's header, and where its payload begins and ends."""

    begin: int
    end: int
    checksum: int
    number: int
    mark: bytes


def encode_frame(record: Frame) -> bytes:
    """Encode a record as a frame with this process's next frame number."""
    return frame_payload(encode_payload(record))


def frame_payload(payload: bytes) -> bytes:
    """Wrap a payload into a frame with this process's next frame number."""
    fields = _FIELDS.pack(_SYNC, next(_numbers) % FRAME_NUMBERS, len(payload), _checksum(payload))
    return fields + _CHECK.pack(crc32(fields)) + payload


def encode_payload(record: Frame) -> bytes:
    """Encode a record as a frame's payload; dead letters hold the same bytes."""
    return _encoder.encode(record)


def _checksum(payload: bytes) -> int:
    """Return the CRC-32 of a payload.

    It is computed in pieces of at most 5,000 bytes, because zlib releases the GIL for longer ones
    and getting it back may take long.
    """
    checksum = crc32(payload[:CHECKSUM_BYTES])
    for start in range(CHECKSUM_BYTES, len(payload), CHECKSUM_BYTES):
        checksum = crc32(payload[start : start + CHECKSUM_BYTES], checksum)
    return checksum


def read_frames(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the offset at which each intact frame ends, and the frame's payload."""
    for piece in read_pieces(data, ended=True):
        if not piece.damage:
            yield piece.end, piece.data


def read_pieces(
    data: bytes,
    *,
    base: int = 0,
    mark: bytes | None = None,
    number: int | None = None,
    ended: bool = False,
) -> Iterator[Piece]:
    """Yield the pieces of `data`, which begins at the offset `base` of its segment.

    Reading stops before the first piece whose end is not known yet, so that the pieces do not
    depend on how much of the segment `data` has.

    `mark` is the mark of the segment's frames, and `number` the number of the first frame, if they
    are known. If the segment has `ended`, an incomplete frame is damaged; otherwise it may still be
    being written.
    """
    at = 0
    while at < len(data):
        head = _head(data, at, mark)
        if head is not None:
            number, mark = head.number, head.mark
            if _is_intact(data, head):
                payload, number = data[head.begin : head.end], (number + 1) % FRAME_NUMBERS
                yield Piece(base + at, base + head.begin, base + head.end, payload, 1, number, "")
                at = head.end
                continue
        end = _end_of_damage(data, at, head, mark, ended)
        if end is None:
            return
        following = _head(data, end, mark)
        if following is None and not ended and 0 < len(data) - end < HEAD_BYTES:
            return
        records = max(_count_lost(number, following, end - at), head is not None)
        number = None if number is None else (number + records) % FRAME_NUMBERS
        damage = f"{end - at} damaged bytes at {base + at}"
        if end == len(data) and (head is None or head.end != end):
            damage = f"a torn or damaged frame of {end - at} bytes at {base + at}"
        yield Piece(base + at, base + at, base + end, data[at:end], records, number, damage)
        at = end


def _head(data: bytes, at: int, mark: bytes | None) -> _Head | None:
    """Return the intact header at `at` with the segment's mark, or None if there is none."""
    if not data.startswith(MAGIC, at) or len(data) - at < HEAD_BYTES:
        return None
    sync, number, length, checksum, check = _HEAD.unpack_from(data, at)
    own_mark = sync[len(MAGIC) :]
    if crc32(data[at : at + _FIELDS.size]) != check or (mark is not None and mark != own_mark):
        return None
    begin = at + HEAD_BYTES
    return _Head(begin, begin + length, checksum, number, own_mark)


def _is_intact(data: bytes, head: _Head) -> bool:
    return head.end <= len(data) and crc32(data[head.begin : head.end]) == head.checksum


def _end_of_damage(
    data: bytes, at: int, head: _Head | None, mark: bytes | None, ended: bool
) -> int | None:
    """Return where the damaged stretch that begins at `at` ends; None if it is not known yet."""
    if head is not None and head.end <= len(data):
        if _seems_frame_start(data, head.end, mark):
            # Intact frames may follow a frame that was cut off, before the end in its header.
            return _intact_within(data, at + 1, head.end, mark) or head.end
    elif head is not None and not ended:
        return None
    # Without a mark, search only data that is not being written any more: a client can put a
    # frame's beginning into a body, which must not be found in a frame that is still incomplete.
    following = _next_frame(data, at + 1, mark) if ended or mark is not None else -1
    if following < 0:
        return len(data) if ended else None
    return following


def _intact_within(data: bytes, at: int, end: int, mark: bytes | None) -> int | None:
    """Return the offset of the first intact frame between `at` and `end`, or None."""
    while 0 <= (at := _next_frame(data, at, mark)) < end:
        head = _head(data, at, mark)
        if head is not None and head.end <= end and _is_intact(data, head):
            return at
        at += 1
    return None


def _seems_frame_start(data: bytes, at: int, mark: bytes | None) -> bool:
    """Return whether a frame seems to begin at `at`; its header may be damaged or incomplete."""
    sync = MAGIC + (mark or b"")
    start = data[at : at + len(sync)]
    return not start or sum(map(bytes.__eq__, _single_bytes(start), _single_bytes(sync))) >= min(
        MIN_ALIKE_BYTES, len(start)
    )


def _single_bytes(data: bytes) -> Iterator[bytes]:
    return (data[at : at + 1] for at in range(len(data)))


def _next_frame(data: bytes, at: int, mark: bytes | None) -> int:
    """Return the offset at which the next frame from `at` on begins, or -1 if there is none."""
    if mark is not None:
        return data.find(MAGIC + mark, at)
    start = data.find(MAGIC, at)
    while start >= 0 and _head(data, start, None) is None:
        start = data.find(MAGIC, start + 1)
    return start


def _count_lost(number: int | None, following: _Head | None, size: int) -> int:
    """Return how many records were lost in a damaged stretch of `size` bytes.

    The count follows from `number`, the next expected one, and that of the `following` frame.
    Return 1 if it is unknown, or if the stretch is too short for that many headers.
    """
    if number is None or following is None:
        return 1
    lost = (following.number - number) % FRAME_NUMBERS
    return lost if lost * HEAD_BYTES <= size else 1


def decode_payload(payload: bytes) -> Frame:
    """Return the record in a payload.

    Raises:
        msgspec.DecodeError: the payload is no record that this version of Pawl knows.
    """
    first = payload[0] if payload else 0
    if first in ARRAYS or first in LONG_ARRAYS:
        return _array_decoder.decode(payload)
    return _map_decoder.decode(payload)
