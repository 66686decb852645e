"""A handler's view of a client's connection: one request, its body, and its reply.

Pieces of a body wait here for their reader; a brake pauses senders that are too fast.
"""

import asyncio
from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING, Final

from proxy.http import wire
from proxy.http.wire import Headers
from store.tenants import DEFAULT

# Reading from a sender pauses when this many bytes are unread, and resumes when they are taken.
HIGH_WATER: Final = 256 * 1024
# Waiting pieces smaller than this are joined: an object for each would take many times the memory.
SMALL_PIECE_BYTES: Final = 1024
# How an event of a stream ends: with a blank line.
EVENT_ENDS: Final = (b"\n\n", b"\r\n\r\n", b"\r\r")
# Called with the number of bytes of a body that have arrived so far.
Grown = Callable[[int], None]


class SharedBrake:
    """Pauses reading from a connection while at least one of several callers asks for it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        """Store the transport, whose reading is not paused."""
        self._transport = transport
        self._pauses = 0

    def pause_reading(self) -> None:
        """Pause reading until `resume_reading` has been called as often as `pause_reading`."""
        self._pauses += 1
        if self._pauses == 1 and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Withdraw one call of `pause_reading`; reading resumes when all are withdrawn."""
        self._pauses -= 1
        if not self._pauses and not self._transport.is_closing():
            self._transport.resume_reading()


# The source of a body's bytes, which is paused while too many are unread.
Brake = asyncio.Transport | SharedBrake


class BodyStream:
    """Pass the pieces of one body from the parser to a reader."""

    __slots__ = (
        "_failure",
        "_loop",
        "_may_brake",
        "_pieces",
        "_size",
        "_source",
        "_waiter",
        "braked",
        "ended",
    )

    def __init__(self, source: Brake, loop: asyncio.AbstractEventLoop) -> None:
        self._source = source
        self._loop = loop
        self._pieces: list[bytes | bytearray] = []
        self._size = 0
        self._waiter: asyncio.Future[None] | None = None
        self._failure: BaseException | None = None
        # Reading from the sender is paused.
        self.braked = False
        self._may_brake = True
        self.ended = False

    @property
    def has_waiting_reader(self) -> bool:
        """Return whether a reader waits for more bytes."""
        return self._waiter is not None

    @property
    def has_untaken_bytes(self) -> bool:
        """Return whether bytes have arrived that were not taken yet."""
        return bool(self._pieces)

    @property
    def exhausted(self) -> bool:
        """Return whether the whole body has arrived and was taken."""
        return self.ended and not self._pieces

    def put(self, data: bytes) -> None:
        if self._pieces and (len(data) < SMALL_PIECE_BYTES or not self._may_brake):
            # A body that is read whole grows in one buffer, which is freed as a whole.
            self._append_to_last(data)
        else:
            self._pieces.append(data)
        self._size += len(data)
        if self._may_brake and self._size > HIGH_WATER and not self.braked:
            self.braked = True
            self._source.pause_reading()
        self._wake()

    def _append_to_last(self, data: bytes) -> None:
        """Append to the last piece, which becomes a `bytearray`."""
        last = self._pieces[-1]
        if isinstance(last, bytearray):
            last += data
        else:
            self._pieces.append(bytearray(data))

    def end(self) -> None:
        self.ended = True
        self._wake()

    def fail(self, error: BaseException) -> None:
        """Mark an unfinished body as broken off; its reader gets `error`."""
        if not self.ended and self._failure is None:
            self._failure = error
            self._wake()

    def take(self, most: int | None = None) -> bytes:
        """Return and remove all unread bytes, or the first `most`; empty if there are none."""
        pieces = self._pieces
        if most is None or self._size <= most:
            # Mostly there is one piece, `bytes`, which is not copied.
            data = bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces)
            self._pieces = []
        else:
            data = self._take_first_bytes(most)
        self._size -= len(data)
        if self.braked and not self._pieces:
            self.braked = False
            self._source.resume_reading()
        return data

    def _take_first_bytes(self, most: int) -> bytes:
        """Take the first `most` of more unread bytes, without copying later pieces."""
        pieces, taken = self._pieces, []
        while len(pieces[0]) <= most:
            most -= len(pieces[0])
            taken.append(pieces.pop(0))
        last = pieces[0]
        if isinstance(last, bytes):
            last = pieces[0] = bytearray(last)
        with memoryview(last) as view:
            taken.append(bytes(view[:most]))
        # A `bytearray` loses its beginning without moving the rest.
        del last[:most]
        return b"".join(taken)

    def raise_failure(self) -> None:
        """Raise the error with which the body broke off, if it did."""
        if self._failure is not None:
            # A copy: a raised error refers to the reader's frames, and these refer to this stream.
            raise copy(self._failure)

    async def wait_for_more(self, most: int | None = None) -> bytes:
        """Wait for more bytes and return them, at most `most`; empty at the end.

        Raises:
            ConnectionError: the body broke off.
        """
        while not self._pieces and not self.ended:
            await self._wait()
        return self.take(most)

    async def read_all(self, limit: int | None = None, grown: Grown | None = None) -> bytes | None:
        """Return the whole body, or None once it is longer than `limit` bytes.

        `grown` is called with the number of bytes so far, before each wait for more. If the result
        is None, or `grown` raises, the bytes are kept for the next reader.

        Raises:
            ConnectionError: the body broke off.
        """
        # The whole body is read at once, so the brake must not keep it from arriving.
        self._may_brake = False
        if self.braked:
            self.braked = False
            self._source.resume_reading()
        try:
            while not self.ended:
                if limit is not None and self._size > limit:
                    return None
                if grown is not None:
                    grown(self._size)
                await self._wait()
        finally:
            self._may_brake = True
        return self.take_unless_longer(limit)

    def take_unless_longer(self, limit: int | None) -> bytes | None:
        """Take and return a body that has ended, or return None if it exceeds `limit` bytes."""
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


if TYPE_CHECKING:
    from proxy.http.server import Connection


class ClientGone(ConnectionError):
    """Report that the client left before the whole request had come or the whole reply gone."""


class BodyTooSlow(ConnectionError):
    """Report that the client sent too little of its request's body within the time allowed."""


class Exchange:
    """One request, and the reply to it."""

    __slots__ = (
        "_connection",
        "_is_bodyless",
        "_sends_chunks",
        "_tail",
        "api_key",
        "body",
        "call",
        "expects",
        "headers",
        "keep_alive",
        "key_name",
        "method",
        "ping",
        "status",
        "target",
        "tenant",
    )

    def __init__(
        self,
        connection: "Connection",
        method: str,
        target: str,
        headers: Headers,
        *,
        keep_alive: bool,
        chunks: bool,
        expects: bool,
    ) -> None:
        """Begin the exchange for a request whose head has come, with its target percent-encoded.

        `keep_alive`: the connection may be used again after this reply. `chunks`: the client
        understands chunked replies. `expects`: it waits for `100 Continue` to send its body.
        """
        self._connection = connection
        self.method = method
        self.target = target
        self.headers = headers
        self.keep_alive = keep_alive
        self.body = BodyStream(connection.brake, connection.loop)
        self.expects = expects
        # An HTTP/1.0 client cannot read chunks, so the end of its reply is the connection's end.
        self._sends_chunks = chunks
        # The reply to HEAD has the head of a reply to GET, and no body (RFC 9110 §9.3.2).
        self._is_bodyless = method == "HEAD"
        # The event to send in a long silence of the reply (empty: its API has none), and the last
        # bytes of the body so far, if there is such an event.
        self.ping = b""
        self._tail = b""
        # The reply's status, once it has begun.
        self.status: int | None = None
        # The call's id, for logs and messages; None if the request is not recorded as a call.
        self.call: str | None = None
        # The request's tenant, and the id and name of its API key, set by the gate.
        self.tenant = DEFAULT
        self.api_key: str | None = None
        self.key_name: str | None = None

    @property
    def started(self) -> bool:
        """Return whether the reply has begun."""
        return self.status is not None

    @property
    def is_open(self) -> bool:
        """Return whether the request is being answered and its client is still connected."""
        return self._connection.is_answering(self)

    def headers_by_name(self) -> dict[str, str]:
        """Return the request's headers by lower-case name; see `wire.headers_by_name`."""
        return wire.headers_by_name(self.headers)

    @property
    def length(self) -> int | None:
        """Return the length of the request's body, or None if the head does not give it."""
        value = wire.first_value(self.headers, b"content-length")
        return int(value) if value is not None and value.isdigit() else None

    @property
    def chunked(self) -> bool:
        """Return whether the request's body comes in chunks, so that its length is unknown."""
        return wire.first_value(self.headers, b"transfer-encoding") is not None

    @property
    def peer_address(self) -> str | None:
        """Return the address of the client's end of the connection, if it has one."""
        return self._connection.peer_address

    @property
    def is_local(self) -> bool:
        """Return whether the client's end of the connection is on this machine."""
        return self._connection.is_local

    def send_continue(self) -> None:
        """Send `100 Continue` if the client waits for it to send its body (RFC 9110 §10.1.1)."""
        if self.expects and not self.started:
            self.expects = False
            self._connection.send(wire.CONTINUE_REPLY)

    def arrived_body(self, limit: int) -> bytes | None:
        """Return the body if all of it has arrived and it has at most `limit` bytes, else None."""
        return self.body.take_unless_longer(limit) if self.body.ended else None

    async def read(self, limit: int, grown: Grown | None = None) -> bytes | None:
        """Return the whole body, or None if it is longer than `limit` bytes.

        While the body arrives, `grown` is called with the number of bytes so far; an exception that
        it raises ends the reading.

        Raises:
            ClientGone: the client left before the body was sent.
            BodyTooSlow: the client sent the body too slowly.
        """
        self.send_continue()
        arriving = self.body
        body = (
            arriving.take_unless_longer(limit)
            if arriving.ended
            else await arriving.read_all(limit, grown)
        )
        if body is None:
            self.keep_alive = False
        return body

    def reply(self, status: int, reason: bytes, headers: Headers, body: bytes) -> None:
        """Send the whole reply."""
        framing: Headers = []
        if not self.body.ended:
            # The rest of an unread body would be read as a request, so the connection closes. The
            # head says so, and the client does not send its next request on it.
            self.keep_alive = False
        if status not in wire.BODYLESS:
            framing = [(b"Content-Length", b"%d" % len(body))]
        head = self._head(status, reason, headers, framing)
        self._send(status, head if self._is_bodyless else head + body)
        self._connection.end_reply(self)

    def begin(self, status: int, reason: bytes, headers: Headers) -> None:
        """Send the reply's head; the body follows in pieces."""
        if status in wire.BODYLESS:
            self._sends_chunks = False
        elif not self._sends_chunks:
            self.keep_alive = False
        framing: Headers = [wire.CHUNKED] if self._sends_chunks else []
        self._send(status, self._head(status, reason, headers, framing))

    def begin_sized(self, status: int, reason: bytes, headers: Headers, length: bytes) -> None:
        """Send the head of a reply of known length; the body follows in pieces."""
        self._sends_chunks = False
        framing: Headers = [(b"Content-Length", length)]
        self._send(status, self._head(status, reason, headers, framing))

    def write(self, data: bytes) -> None:
        """Send the next piece of the body, at once."""
        if data and not self._is_bodyless:
            if self.ping:
                self._tail = (self._tail + data[-4:])[-4:]
            self._connection.send(wire.chunk(data) if self._sends_chunks else data)

    def send_ping(self) -> None:
        """Send the ping, unless the reply has none or is in the middle of an event."""
        if self.ping and (not self._tail or self._tail.endswith(EVENT_ENDS)):
            self.write(self.ping)

    def end(self, data: bytes = b"") -> None:
        """Send the last piece and the body's end, in one write."""
        if self._sends_chunks:
            data = (wire.chunk(data) if data else b"") + wire.LAST_CHUNK
        if data and not self._is_bodyless:
            self._connection.send(data)
        self._connection.end_reply(self)

    async def wait_until_drained(self) -> None:
        """Wait while the client reads more slowly than we write.

        Raises:
            ClientGone: the client left meanwhile.
        """
        await self._connection.wait_until_drained()

    def tear(self) -> None:
        """Close the connection before the body's end, so that the client sees a broken reply."""
        self._connection.transport.close()

    def abort(self) -> None:
        self._connection.transport.abort()

    def _send(self, status: int, head: bytes) -> None:
        self.status = status
        self._connection.send(head)

    def _head(self, status: int, reason: bytes, headers: Headers, framing: Headers) -> bytes:
        if self._connection.server.draining:
            self.keep_alive = False
        closing = [] if self.keep_alive else [wire.CLOSE]
        return wire.reply_head(status, reason, [*headers, *framing, *closing])
