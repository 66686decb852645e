"""What a worker writes down of a call: the bytes as they were, and what only it could know.

Nothing is parsed here that serving does not need: the keeper reads the bytes again through
the same pure dialect and makes the ledger's record of them (`proxy.keeping.transcribe`).
"""

import zlib
from collections.abc import Callable
from typing import Final

from store.records import CallStatus, Confidence, FeedbackRecord, Record, ToolEvent

# A long reply's bytes wait in memory until its end; from this size on they are deflated.
DEFLATE_FROM: Final = 64 * 1024
LEVEL: Final = 1
# A few bytes can stand for very many; so many may become of one reply, unless settings say more.
MOST_INFLATED: Final = 256 * 2**20


class Captured(Record, frozen=True, kw_only=True, tag="captured", array_like=True):
    """One call as its worker saw it.

    `request` is the client's body, `reply` the upstream's (deflated where `deflated`), ids
    included; `started_at` is Unix time in seconds; `id` the bytes of a UUIDv7.
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
    offers: tuple[bytes, ...]
    asks: tuple[bytes, ...]
    retry_of: bytes | None
    retry: int
    tool_events: tuple[ToolEvent, ...]
    default_temperature: float
    started_at: float
    first_chunk_ms: float | None
    total_ms: float


class Gap(Record, frozen=True, kw_only=True, tag="gap", array_like=True):
    """Calls of these episodes could not be written down: the episodes are not whole."""

    id: bytes
    episodes: tuple[str, ...]


Frame = Captured | FeedbackRecord | Gap


class Tape:
    """A reply's bytes as they come, small in memory however long a stream gets."""

    __slots__ = ("_deflater", "_grown", "_packed", "_pieces", "_size")

    def __init__(self, grown: Callable[[int], None] | None = None) -> None:
        """`grown` is told of bytes that are kept for longer, each time some are."""
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
        """All of it, and whether it is deflated."""
        if self._deflater is None:
            return b"".join(self._pieces), False
        self._pack()
        return b"".join([*self._packed, self._deflater.flush()]), True


class ReplyTooLong(Exception):
    """A reply is longer than what is read into memory at once."""


def inflate(reply: bytes, deflated: bool, most: int = MOST_INFLATED) -> bytes:
    """Return what `Tape` was given.

    Raises:
        zlib.error: it was deflated, and is damaged.
        ReplyTooLong: it is more than `most` bytes.
    """
    if not deflated:
        return reply
    inflater = zlib.decompressobj()
    inflated = inflater.decompress(reply, most + 1)
    if len(inflated) > most:
        raise ReplyTooLong(
            f"the reply is longer than {most} bytes; raise PAWL_MAX_REPLY_MB, then "
            "`pawl spool --replay` stores it"
        )
    if not inflater.eof:
        raise zlib.error("the deflated reply ends before its end")
    return inflated
