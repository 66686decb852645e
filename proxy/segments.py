"""The spool's file format (pure): frames of length, CRC-32 and payload.

    | u32 LE length | u32 LE crc32(payload) | payload |

A frame is whole or it is not there: a torn or damaged tail ends the reading, and what
comes before it stands.
"""

import struct
from collections.abc import Iterator
from typing import Final
from zlib import crc32

import msgspec

from proxy.capture import Captured, Frame, Gap
from store.records import FeedbackRecord

HEADER: Final = struct.Struct("<II")
PIECE: Final = 5000

_encoder: Final = msgspec.msgpack.Encoder()
# Structs that are arrays on the wire cannot share a union with one that is a map.
_captured: Final[msgspec.msgpack.Decoder[Captured | Gap]] = msgspec.msgpack.Decoder(Captured | Gap)
_feedback: Final = msgspec.msgpack.Decoder(FeedbackRecord)
ARRAYS: Final = range(0x90, 0xA0)
LONG_ARRAYS: Final = (0xDC, 0xDD)


def encode_frame(record: Frame) -> bytes:
    """One record as a frame."""
    payload = _encoder.encode(record)
    return HEADER.pack(len(payload), _checksum(payload)) + payload


def _checksum(payload: bytes) -> int:
    """CRC-32, in pieces for which zlib does not let other threads run (it does from 5 KB on)."""
    checksum = crc32(payload[:PIECE])
    for start in range(PIECE, len(payload), PIECE):
        checksum = crc32(payload[start : start + PIECE], checksum)
    return checksum


def read_frames(data: bytes, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """The whole payloads from `offset` on, each with the offset at which its frame ends."""
    while offset + HEADER.size <= len(data):
        length, checksum = HEADER.unpack_from(data, offset)
        start = offset + HEADER.size
        payload = data[start : start + length]
        if len(payload) < length or crc32(payload) != checksum:
            return
        offset = start + length
        yield offset, payload


def decode_payload(payload: bytes) -> Frame:
    """The record in a payload.

    Raises:
        msgspec.DecodeError: it is none of ours (a newer or older Pawl wrote it).
    """
    first = payload[0] if payload else 0
    if first in ARRAYS or first in LONG_ARRAYS:
        return _captured.decode(payload)
    return _feedback.decode(payload)
