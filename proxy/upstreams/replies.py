"""Define an upstream's reply, and take its content coding off.

A request for ids asks for `identity`, but some servers and balancers compress all the same, and
token ids can only be removed from a decoded reply. A stream then leaves without its coding. A whole
reply from which nothing had to be removed leaves as it came, coding and all.
"""

import re
import zlib
from collections.abc import AsyncIterator, Iterator
from typing import Final, Protocol

from proxy.errors import Redirected, UnreadableCoding
from proxy.http.client import Torn
from proxy.http.wire import Headers

EVENT_STREAM: Final = b"text/event-stream"
CODING: Final = b"content-encoding"
PLAIN: Final = (b"", b"identity")
# RFC 9110 §8.4.1; `deflate` is defined as zlib's format, but some send it without its header.
KNOWN: Final = (b"gzip", b"x-gzip", b"deflate")
GZIP_OR_ZLIB: Final = 32 + zlib.MAX_WBITS
BARE: Final = -zlib.MAX_WBITS
MAGIC: Final = b"\x1f\x8b"
ERRORS: Final = 400
# Bytes decoded at once: a small piece may decode to very many.
STEP: Final = 256 * 1024


class Reply(Protocol):
    """Give a reply whose head has come; its body may still be on its way."""

    status: int
    reason: bytes
    # As they came.
    headers: Headers

    def header(self, wanted: bytes) -> bytes | None:
        """Return a header's value, or None; `wanted` is its name in lower case."""

    def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes.

        Raises:
            Torn: the body broke off.
        """

    async def read(self, limit: int | None = None) -> bytes | None:
        """Return the whole body, or None once it is longer than `limit` bytes.

        Raises:
            Torn: the body broke off.
        """

    @property
    def ended(self) -> bool:
        """Return whether the whole body has come and was taken."""

    def unread(self) -> bytes:
        """Return the bytes of a torn body that came and were not taken."""

    def close(self) -> None:
        """Release the reply; if it has not ended, its sender is told to stop."""

    def discard(self) -> None:
        """Release the reply and close what it came over, ended or not."""


def comes_in_events(reply: Reply) -> bool:
    """Return whether a reply is a stream of events that can be read as one."""
    kind = reply.header(b"content-type") or b""
    return kind.startswith(EVENT_STREAM) and not reply.header(b"content-encoding")


def readable(reply: Reply) -> Reply:
    """Return the reply with plain bytes; an error in an unknown coding is returned as it is.

    Raises:
        UnreadableCoding: the reply is not an error and has an unknown coding, so that what was
            added to its request could not be removed from it.
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
    """Return the headers and body to pass on, where `out` was made of the decoded `body`.

    They are the original ones, coding included, if `out` is the same as `body`.
    """
    if isinstance(reply, Decoded) and out == body:
        return reply.coded.headers, reply.raw
    return reply.headers, out


class Decoder:
    """Decode a body piece by piece, including all members of a gzip file."""

    def __init__(self) -> None:
        """Begin before the first byte."""
        self._engine = zlib.decompressobj(GZIP_OR_ZLIB)
        self._begun = False

    def decode(self, data: bytes) -> Iterator[bytes]:
        """Yield what `data` decodes to, at most `STEP` bytes at once.

        Raises:
            Torn: the data is not in this coding.
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
        """Continue with the next gzip member; other trailing bytes are ignored, as gzip does."""
        if not data.startswith(MAGIC):
            return b""
        self._engine = zlib.decompressobj(GZIP_OR_ZLIB)
        return data

    def check_end(self) -> None:
        """Check that the coding came to its end.

        Raises:
            Torn: it did not.
        """
        if self._begun and not self._engine.eof:
            raise Torn("its content coding breaks off")


class Decoded:
    """Pass a reply on with its content coding removed."""

    def __init__(self, reply: Reply) -> None:
        """Wrap `reply`, whose coding is one of `KNOWN`."""
        self.coded = reply
        self.raw = b""
        self.status = reply.status
        self.reason = reply.reason
        self.headers = [pair for pair in reply.headers if pair[0].lower() != CODING]
        self._decoder = Decoder()
        self._ended = False

    def header(self, wanted: bytes) -> bytes | None:
        """Return a header's value, or None; the content coding is hidden."""
        return None if wanted == CODING else self.coded.header(wanted)

    @property
    def ended(self) -> bool:
        """Return whether the whole body was decoded and taken."""
        return self._ended

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the decoded body as it comes.

        Raises:
            Torn: the body or its coding broke off.
        """
        async for data in self.coded.pieces():
            for piece in self._decoder.decode(data):
                yield piece
        self._decoder.check_end()
        self._ended = True

    async def read(self, limit: int | None = None) -> bytes | None:
        """Return the whole decoded body, or None once that is longer than `limit` bytes.

        Raises:
            Torn: the body or its coding broke off.
        """
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
        """Return the bytes of a torn body, still coded, for they may not be decodable."""
        return self.raw or self.coded.unread()

    def close(self) -> None:
        """Close the original reply."""
        self.coded.close()

    def discard(self) -> None:
        """Discard the original reply and its connection."""
        self.coded.discard()


LOCATION: Final = b"location"
REDIRECTS: Final = range(300, 400)
# Of what is relative to this proxy a path's beginning is all that there is. Browsers' rules take a
# backslash for a slash, and leave tabs out.
_STAYS: Final = re.compile(rb"(?:/(?![/\\\t])|\?|#|\.{1,2}(?:/|\Z)|\Z)")


def check_redirect(reply: Reply, api_key: str | None) -> None:
    """Check that a reply sends a client that has one of this proxy's keys to no other place.

    `api_key` is the id of the client's key, None if no key is asked for.

    Clients follow a redirect by themselves, and some show the new place all of their headers: HTTP
    libraries leave out `Authorization` where the host is another, and `x-api-key` not.

    Raises:
        Redirected: it does.
    """
    if api_key is None or reply.status not in REDIRECTS:
        return
    for name, value in reply.headers:
        if name.lower() == LOCATION and _STAYS.match(value.strip()) is None:
            raise Redirected(
                f"The model server answered {reply.status} and sends the client to another "
                "address. That is not passed on, as the client would show its API key of this "
                "proxy there. Set the upstream's address to the one that it names",
                code="upstream_redirects",
            )
