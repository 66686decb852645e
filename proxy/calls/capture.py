"""Capture a call: its bytes as they were, and what only the worker could know.

A worker parses only what serving needs. The ingester reads the bytes again through the same format
and makes the ledger's record of them (`proxy.ingester.transcribe`).
"""

import zlib
from collections.abc import Callable, Mapping
from typing import Final

from store.records import (
    TRAIN,
    Arm,
    CallRecord,
    CallStatus,
    Confidence,
    FeedbackRecord,
    Record,
    Split,
    ToolEvent,
)

# A reply's bytes wait in memory until its end; beyond this size they are deflated.
DEFLATE_FROM: Final = 64 * 1024
LEVEL: Final = 1
# Longest reply that is inflated by default, in bytes: few deflated bytes can hold very many.
MOST_INFLATED: Final = 256 * 2**20


class CapturedCall(Record, frozen=True, kw_only=True, tag="captured", array_like=True):
    """Describe one call as its worker saw it.

    `id` is the bytes of a UUIDv7. `request` is the client's body; `reply` is the upstream's, token
    ids included, deflated if `deflated` is set. `started_at` is Unix time in seconds. `provides`
    and `needs` are fingerprints (`proxy.identity.call_memory`).

    It is stored as an array: the order of the fields is what a spool's bytes depend on.
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
    # What the upstream samples with besides, where the request does not say.
    sampling_defaults: Mapping[str, float] = {}
    split: Split = TRAIN
    # Whether the upstream may hold calls of strict tools to a grammar.
    tool_grammars: bool = True
    # What exploration changed of the request, as `proxy.exploring` makes it.
    explored: Mapping[str, float | None] | None = None
    # The syntax of that grammar (`proxy.formats.sampling`), where it is known.
    tool_tag: str | None = None
    arm: Arm | None = None
    # The id of the API key that let it in.
    api_key: str | None = None


class Gap(Record, frozen=True, kw_only=True, tag="gap", array_like=True):
    """Mark episodes as incomplete, because records of their calls could not be written."""

    id: bytes
    episodes: tuple[str, ...]


# A call that was redacted is recorded as the ledger has it.
Frame = CapturedCall | CallRecord | FeedbackRecord | Gap


class ReplyBuffer:
    """Keep a reply's bytes as they come; a long stream is compressed in memory."""

    __slots__ = ("_deflater", "_grown", "_packed", "_pieces", "_size")

    def __init__(self, grown: Callable[[int], None] | None = None) -> None:
        """Begin empty; `grown` is called with the size of each compressed piece that is kept."""
        self._grown = grown
        self._pieces: list[bytes] = []
        self._size = 0
        self._packed: list[bytes] = []
        self._deflater: zlib._Compress | None = None

    def keep(self, data: bytes) -> None:
        """Keep a reply that came in one piece: it is in memory anyway."""
        self._pieces.append(data)

    def add(self, data: bytes) -> None:
        """Keep a piece of a stream."""
        self._pieces.append(data)
        self._size += len(data)
        if self._size > DEFLATE_FROM:
            self._pack()

    def _pack(self) -> None:
        if self._deflater is None:
            self._deflater = zlib.compressobj(LEVEL)
        packed = self._deflater.compress(b"".join(self._pieces))
        self._packed.append(packed)
        self._pieces, self._size = [], 0
        if self._grown is not None:
            self._grown(len(packed))

    def take(self) -> tuple[bytes, bool]:
        """Return all bytes, and whether they are deflated (zlib format, RFC 1950)."""
        if self._deflater is None:
            return b"".join(self._pieces), False
        self._pack()
        return b"".join([*self._packed, self._deflater.flush()]), True


class ReplyTooLong(Exception):
    """Report that a reply is longer than the limit for reading it into memory."""


def inflate(reply: bytes, most: int = MOST_INFLATED) -> bytes:
    """Return the bytes of a deflated reply as they were before `ReplyBuffer` deflated them.

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
