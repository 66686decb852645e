"""One request and its reply: what a handler sees of a client's connection."""

from typing import TYPE_CHECKING

from proxy.http import wire
from proxy.http.flow import Grown, Inflow
from proxy.http.wire import Headers

if TYPE_CHECKING:
    from proxy.http.connection import Connection


class ClientGone(ConnectionError):
    """The client closed its connection before it had its answer."""


class BodyTooSlow(ConnectionError):
    """The client sent too little of its request's body within the time it is given for that."""


class Exchange:
    """One request and the reply that is being given to it."""

    __slots__ = (
        "_connection",
        "_framed",
        "_silent",
        "body",
        "call",
        "expects",
        "headers",
        "keep_alive",
        "method",
        "started",
        "target",
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
        self._connection = connection
        self.method = method
        self.target = target
        self.headers = headers
        self.keep_alive = keep_alive
        self.body = Inflow(connection.transport, connection.loop)
        self.expects = expects
        # An HTTP/1.0 client knows no chunks: its reply ends with the connection.
        self._framed = chunks
        # RFC 9110 §9.3.2: the head that GET would have, and no body.
        self._silent = method == "HEAD"
        self.started = False
        # The recorded call that it is, for whoever has something to tell of it.
        self.call: str | None = None

    @property
    def open(self) -> bool:
        """Whether its reply is still due, or under way, and the client there."""
        return self._connection.answering(self)

    @property
    def length(self) -> int | None:
        """The body's length, where the head says it."""
        value = self._header(b"content-length")
        return int(value) if value is not None and value.isdigit() else None

    @property
    def chunked(self) -> bool:
        """Whether the body comes in chunks, its length unknown."""
        return self._header(b"transfer-encoding") is not None

    def _header(self, wanted: bytes) -> bytes | None:
        return next((value for name, value in self.headers if name.lower() == wanted), None)

    def ask_on(self) -> None:
        """Tell a client that waits for it to send its body (RFC 9110 §10.1.1)."""
        if self.expects and not self.started:
            self.expects = False
            self._connection.send(wire.CONTINUE)

    async def read(self, limit: int, grown: Grown | None = None) -> bytes | None:
        """The whole body; None if it is longer than `limit`.

        `grown` is told how much of it has come, again and again; what it raises ends the reading.

        Raises:
            ClientGone: the client left before it was sent.
        """
        self.ask_on()
        body = await self.body.whole(limit, grown)
        if body is None:
            self.keep_alive = False
        return body

    def reply(self, status: int, reason: bytes, headers: Headers, body: bytes) -> None:
        """Give the whole reply."""
        framing: Headers = []
        if status not in wire.BODYLESS:
            framing = [(b"Content-Length", b"%d" % len(body))]
        head = self._head(status, reason, headers, framing)
        self._send(head if self._silent else head + body)
        self._connection.answered(self)

    def begin(self, status: int, reason: bytes, headers: Headers) -> None:
        """Give the reply's head; the body follows in pieces."""
        if status in wire.BODYLESS:
            self._framed = False
        elif not self._framed:
            self.keep_alive = False
        framing: Headers = [wire.CHUNKED] if self._framed else []
        self._send(self._head(status, reason, headers, framing))

    def begin_sized(self, status: int, reason: bytes, headers: Headers, length: bytes) -> None:
        """Give the head of a reply whose length is known; the body follows in pieces."""
        self._framed = False
        framing: Headers = [(b"Content-Length", length)]
        self._send(self._head(status, reason, headers, framing))

    def write(self, data: bytes) -> None:
        """Give the next piece, at once."""
        if data and not self._silent:
            self._connection.send(wire.chunk(data) if self._framed else data)

    def end(self, data: bytes = b"") -> None:
        """Give the last piece and the body's end, in one write."""
        if self._framed:
            data = (wire.chunk(data) if data else b"") + wire.LAST_CHUNK
        if data and not self._silent:
            self._connection.send(data)
        self._connection.answered(self)

    async def drained(self) -> None:
        """Wait while the client is slower than we are."""
        await self._connection.drained()

    def tear(self) -> None:
        """Close in the middle of a body: what was sent arrives, and is seen not to be all."""
        self._connection.transport.close()

    def abort(self) -> None:
        """Break the connection off at once."""
        self._connection.transport.abort()

    def _send(self, head: bytes) -> None:
        self.started = True
        self._connection.send(head)

    def _head(self, status: int, reason: bytes, headers: Headers, framing: Headers) -> bytes:
        if self._connection.server.draining:
            self.keep_alive = False
        closing = [] if self.keep_alive else [wire.CLOSE]
        return wire.reply_head(status, reason, [*headers, *framing, *closing])
