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

from store.records import CallRecord, FeedbackRecord, SpoolRecord

HEADER: Final = struct.Struct("<II")

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final[msgspec.msgpack.Decoder[SpoolRecord]] = msgspec.msgpack.Decoder(
    CallRecord | FeedbackRecord
)


def encode_frame(record: SpoolRecord) -> bytes:
    """One record as a frame."""
    payload = _encoder.encode(record)
    return HEADER.pack(len(payload), crc32(payload)) + payload


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


def decode_payload(payload: bytes) -> SpoolRecord:
    """The record in a payload.

    Raises:
        msgspec.DecodeError: it is none of ours (a newer or older Pawl wrote it).
    """
    return _decoder.decode(payload)
