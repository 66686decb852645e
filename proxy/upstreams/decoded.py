"""Replies in a content coding, decoded: what was added to a request is taken out of plain bytes.

Such a request asks for `identity`; a server or a balancer that compresses all the same is
understood. A stream then leaves without its coding. A reply in one piece out of which nothing
had to be taken leaves as it came, coding and all.
"""

import zlib
from collections.abc import AsyncIterator, Iterator
from typing import Final

from proxy.errors import UnreadableCoding
from proxy.http.client import Torn
from proxy.http.wire import Headers
from proxy.upstreams.model_server import Reply

CODING: Final = b"content-encoding"
PLAIN: Final = (b"", b"identity")
# RFC 9110 §8.4.1; `deflate` is meant to be zlib's format, and some send it bare.
KNOWN: Final = (b"gzip", b"x-gzip", b"deflate")
GZIP_OR_ZLIB: Final = 32 + zlib.MAX_WBITS
BARE: Final = -zlib.MAX_WBITS
MAGIC: Final = b"\x1f\x8b"
ERRORS: Final = 400
# So much is decoded at once: a small piece may stand for very much.
STEP: Final = 256 * 1024


def readable(reply: Reply) -> Reply:
    """Return the reply with plain bytes; an error in a coding that nobody here knows as it is.

    Raises:
        UnreadableCoding: it is an answer in such a coding, and what was added to its request
            could not be taken out of it.
    """
    coding = (reply.header(CODING) or b"").strip().lower()
    if coding in PLAIN:
        return reply
    if coding in KNOWN:
        return Decoded(reply)
    if reply.status >= ERRORS:
        return reply
    name = coding.decode("latin-1")[:40]
    raise UnreadableCoding(
        f"The model server was asked for a reply without content coding, and sent one in {name!r}, "
        "which this proxy cannot decode to take out the token ids that it asked for. Turn "
        "compression off there, or in what stands before it",
        code="unreadable_coding",
    )


def as_came(reply: Reply, body: bytes, out: bytes) -> tuple[Headers, bytes]:
    """Return the headers and the body to pass on, where `body` was read and `out` made of it."""
    if isinstance(reply, Decoded) and out == body:
        return reply.coded.headers, reply.raw
    return reply.headers, out


class Decoder:
    """Decodes a body piece by piece, each member of a gzip file in its turn."""

    def __init__(self) -> None:
        self._engine = zlib.decompressobj(GZIP_OR_ZLIB)
        self._begun = False

    def decode(self, data: bytes) -> Iterator[bytes]:
        """Give what `data` says, no more than `STEP` at once.

        Raises:
            Torn: it is not in this coding.
        """
        while data:
            try:
                piece = self._engine.decompress(data, STEP)
            except zlib.error as error:
                if self._begun:
                    raise Torn(f"its content coding is broken: {error}") from error
                self._engine, self._begun = zlib.decompressobj(BARE), True
                continue
            self._begun = True
            if piece:
                yield piece
            data = self._engine.unconsumed_tail
            if self._engine.eof:
                data = self._next_member(self._engine.unused_data)

    def _next_member(self, data: bytes) -> bytes:
        """Go on with what follows a member; what is none is no content, as in gzip itself."""
        if not data.startswith(MAGIC):
            return b""
        self._engine = zlib.decompressobj(GZIP_OR_ZLIB)
        return data

    def check_end(self) -> None:
        """See that the body came to its end.

        Raises:
            Torn: it did not.
        """
        if self._begun and not self._engine.eof:
            raise Torn("its content coding breaks off")


class Decoded:
    """A reply whose content coding is taken off."""

    def __init__(self, reply: Reply) -> None:
        self.coded = reply
        self.raw = b""
        self.status = reply.status
        self.reason = reply.reason
        self.headers = [pair for pair in reply.headers if pair[0].lower() != CODING]
        self._decoder = Decoder()
        self._ended = False

    def header(self, wanted: bytes) -> bytes | None:
        """See `Reply`."""
        return None if wanted == CODING else self.coded.header(wanted)

    @property
    def ended(self) -> bool:
        """See `Reply`."""
        return self._ended

    async def pieces(self) -> AsyncIterator[bytes]:
        """See `Reply`."""
        async for data in self.coded.pieces():
            for piece in self._decoder.decode(data):
                yield piece
        self._decoder.check_end()
        self._ended = True

    async def read(self, limit: int | None = None) -> bytes | None:
        """See `Reply`; the limit is that of the decoded bytes."""
        raw = await self.coded.read(limit)
        if raw is None:
            return None
        self.raw = raw
        pieces, size = [], 0
        for piece in self._decoder.decode(raw):
            pieces.append(piece)
            size += len(piece)
            if limit is not None and size > limit:
                return None
        self._decoder.check_end()
        return b"".join(pieces)

    def unread(self) -> bytes:
        """See `Reply`: in its coding, of which nobody knows whether it can be decoded."""
        return self.raw or self.coded.unread()

    def close(self) -> None:
        """See `Reply`."""
        self.coded.close()

    def discard(self) -> None:
        """See `Reply`."""
        self.coded.discard()
