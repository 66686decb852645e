"""Carry a body on its way: the pieces that arrived, and a brake on senders that are too fast.

A request's body is its exchange's (`proxy.http.exchange`); a server's reply is its head and a body.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, Protocol

from proxy.http import wire
from proxy.http.wire import Headers

if TYPE_CHECKING:
    from proxy.http.client import UpstreamConnection

# Reading from a sender pauses when this many bytes are unread, and resumes when they are taken.
HIGH_WATER: Final = 256 * 1024
# Waiting pieces smaller than this are joined: an object for each would take many times the memory.
SMALL: Final = 1024
Grown = Callable[[int], None]


class Brake(Protocol):
    """Pause and resume a source of bytes, such as a transport."""

    def pause_reading(self) -> None:
        """Stop reading."""

    def resume_reading(self) -> None:
        """Read again."""


class SharedBrake:
    """Share the brake of a connection between parts that pause it, each for a reason of its own."""

    def __init__(self, transport: asyncio.Transport) -> None:
        """Store the transport, which is reading."""
        self._transport = transport
        self._pauses = 0

    def pause_reading(self) -> None:
        """Stop reading, until `resume_reading` was called as often as this."""
        self._pauses += 1
        if self._pauses == 1 and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again, unless another part still waits."""
        self._pauses -= 1
        if not self._pauses and not self._transport.is_closing():
            self._transport.resume_reading()


class BodyStream:
    """Pass the pieces of one body from the parser to a reader."""

    __slots__ = (
        "_braked",
        "_failure",
        "_loop",
        "_patient",
        "_pieces",
        "_size",
        "_source",
        "_waiter",
        "ended",
    )

    def __init__(self, source: Brake, loop: asyncio.AbstractEventLoop) -> None:
        """Begin an empty body from `source`."""
        self._source = source
        self._loop = loop
        self._pieces: list[bytes | bytearray] = []
        self._size = 0
        self._waiter: asyncio.Future[None] | None = None
        self._failure: BaseException | None = None
        self._braked = False
        self._patient = True
        self.ended = False

    @property
    def awaited(self) -> bool:
        """Return whether a reader waits for more."""
        return self._waiter is not None

    @property
    def exhausted(self) -> bool:
        """Return whether the whole body has arrived and was taken."""
        return self.ended and not self._pieces

    @property
    def braked(self) -> bool:
        """Return whether reading from the sender is paused."""
        return self._braked

    def put(self, data: bytes) -> None:
        """Add bytes that arrived."""
        if len(data) < SMALL and self._pieces:
            self._join(data)
        else:
            self._pieces.append(data)
        self._size += len(data)
        if self._patient and self._size > HIGH_WATER and not self._braked:
            self._braked = True
            self._source.pause_reading()
        self._wake()

    def _join(self, data: bytes) -> None:
        """Append to the last piece; the first piece of all stays as it came, and is `bytes`."""
        last = self._pieces[-1]
        if isinstance(last, bytearray):
            last += data
        else:
            self._pieces.append(bytearray(data))

    def end(self) -> None:
        """Mark the body as complete."""
        self.ended = True
        self._wake()

    def fail(self, error: BaseException) -> None:
        """Mark the body as broken off; its reader gets `error`."""
        if not self.ended and self._failure is None:
            self._failure = error
            self._wake()

    def take(self) -> bytes:
        """Return all unread bytes; empty if there are none."""
        pieces = self._pieces
        # Mostly there is one piece. The first piece is always `bytes`, and is not copied.
        data = bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces)
        self._pieces = []
        self._size = 0
        if self._braked:
            self._braked = False
            self._source.resume_reading()
        return data

    def raise_failure(self) -> None:
        """Raise the error that the body broke off with, if it did."""
        if self._failure is not None:
            raise self._failure

    async def more(self) -> bytes:
        """Wait for more bytes and return them; empty at the end.

        Raises:
            ConnectionError: the body broke off.
        """
        while not self._pieces and not self.ended:
            await self._wait()
        return self.take()

    async def whole(self, limit: int | None = None, grown: Grown | None = None) -> bytes | None:
        """Return the whole body, or None once it is longer than `limit` bytes.

        `grown` is called with the number of bytes so far, whenever there are more.

        Raises:
            ConnectionError: the body broke off.
        """
        # The whole body is read at once, so the brake must not keep it from arriving.
        self._patient = False
        if self._braked:
            self._braked = False
            self._source.resume_reading()
        while not self.ended:
            if limit is not None and self._size > limit:
                return None
            if grown is not None:
                grown(self._size)
            await self._wait()
        return self.within(limit)

    def within(self, limit: int | None) -> bytes | None:
        """Return the whole body, which has ended, or None if it is longer than `limit` bytes."""
        return None if limit is not None and self._size > limit else self.take()

    async def _wait(self) -> None:
        self.raise_failure()
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Reply:
    """Give a reply whose head has come; its body may still be on its way."""

    __slots__ = ("_connection", "body", "headers", "reason", "status")

    def __init__(
        self, connection: "UpstreamConnection", status: int, reason: bytes, headers: Headers
    ) -> None:
        """Store the head, and begin to receive the body."""
        self._connection = connection
        self.status = status
        self.reason = reason
        self.headers = headers
        self.body = BodyStream(connection.transport, connection.loop)

    def header(self, wanted: bytes) -> bytes | None:
        """Return a header's value, or None; `wanted` is its name in lower case."""
        return wire.first_value(self.headers, wanted)

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes.

        Raises:
            Torn: the body broke off.
        """
        while data := await self.body.more():
            yield data

    def read(self, limit: int | None = None) -> Coroutine[Any, Any, bytes | None]:
        """Return the whole body, or None once it is longer than `limit` bytes.

        Raises:
            Torn: the body broke off.
        """
        return self.body.whole(limit)

    @property
    def ended(self) -> bool:
        """Return whether the whole body has come and was taken."""
        return self.body.exhausted

    def unread(self) -> bytes:
        """Return the bytes of a torn body that came and were not taken."""
        return self.body.take()

    def close(self) -> None:
        """Release the reply; if it has not ended, its connection is closed and the server stops."""
        if not self.body.ended:
            self._connection.abort()

    def discard(self) -> None:
        """Release the reply and close its connection, unless another request has that by now."""
        if not self.body.ended or self._connection.usable:
            self._connection.abort()
