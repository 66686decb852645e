"""HTTP/1.1 client: pools of connections to servers, and replies that are read as they arrive."""

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from time import monotonic, sleep
from typing import Any, Final, cast

import httptools
import structlog

from proxy.http import wire
from proxy.http.exchange import BodyStream, Grown
from proxy.http.wire import Headers

# vLLM closes idle connections after 5 s; a reused connection must be younger.
KEEPALIVE_S: Final = 3.0
CONNECT_S: Final = 10.0
# Limit on a reply's head, and on the bytes between the pieces of its body: sizes, trailers.
MAX_HEAD_BYTES: Final = 256 * 1024
log = structlog.get_logger()


class NotSent(ConnectionError):
    """Report that no connection could be made, so that nothing of the request was sent."""


class NoReply(ConnectionError):
    """Report that the connection broke before a reply began."""


class Silent(NoReply):
    """Report that the server was silent for too long before a reply began."""


class Torn(ConnectionError):
    """Report that a reply broke off before its end."""


# Bytes of a reply that are processed before other calls get their turn.
TURN_BYTES: Final = 16 * 1024
# A thread that waits for the GIL takes some 50 us to wake. A busy event loop releases the GIL for
# less: the spool's writer thread waited 2 to 3 ms before each of its steps. In seconds; Linux adds
# 50 us.
WAKE_S: Final = 20e-6


def let_threads_run() -> None:
    """Release the GIL for long enough that a waiting thread gets it."""
    sleep(WAKE_S)


class UpstreamConnection(asyncio.Protocol):
    """One connection to a server; asyncio and httptools call it back."""

    transport: asyncio.Transport

    def __init__(self, pool: "Pool") -> None:
        self._pool = pool
        # Kept because asyncio.get_running_loop() costs a system call each time.
        self.loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._head: asyncio.Future[Reply] | None = None
        self._reply: Reply | None = None
        self._reason = b""
        self._headers: Headers = []
        self._is_interim = False
        self._until_close = False
        self._to_head = False
        # Bytes that came since the last piece of a body, or since the end of the last head.
        self._overhead = 0
        self._can_write: asyncio.Future[None] | None = None
        self.sending = False
        self.pushing: asyncio.Task[None] | None = None
        self.last_heard = 0.0

    @property
    def usable(self) -> bool:
        """Return whether the connection is open and no reply is due or under way."""
        return self._head is None and self._reply is None and not self.transport.is_closing()

    def ask(self, data: bytes, *, to_head: bool = False) -> "asyncio.Future[Reply]":
        """Send a request (or its beginning); return a future that gives the reply at its head.

        `to_head`: the method is HEAD, so no body follows, whatever the reply's head says.
        """
        self.last_heard = monotonic()
        self._to_head = to_head
        self._overhead = 0
        self._head = self.loop.create_future()
        self.transport.write(data)
        return self._head

    async def send_more(self, data: bytes) -> None:
        """Send more of the request, no faster than the server reads it."""
        self.transport.write(data)
        if self._can_write is not None:
            await self._can_write
        # The client took the time until now: it does not count as the server's silence.
        self.last_heard = monotonic()

    def give_up(self, why: str) -> None:
        """Close the connection, because the server has been silent for too long."""
        self._fail(why, Silent)
        self.transport.abort()

    @property
    def waits_for_reply(self) -> bool:
        """Return whether somebody waits for the server: for a reply's head, or for its body."""
        reading = self._reply is not None and self._reply.body.has_waiting_reader
        return self._head is not None or reading

    # Callbacks of asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._pool.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the pending reply, unless the close is the regular end of its body."""
        self._pool.connections.discard(self)
        if self.pushing is not None:
            self.pushing.cancel()
        if self._reply is not None and self._until_close and exc is None:
            self._reply.body.end()
        self._fail("the connection was closed")
        if self._can_write is not None and not self._can_write.done():
            self._can_write.set_result(None)

    def data_received(self, data: bytes) -> None:
        """Parse the bytes; close the connection if they are not HTTP, or a head is too long."""
        self.last_heard = monotonic()
        self._overhead += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"the reply is not HTTP: {error}")
            self.transport.abort()
        else:
            if self._overhead > MAX_HEAD_BYTES:
                self._fail(f"the reply's head or trailers have more than {MAX_HEAD_BYTES} bytes")
                self.transport.abort()

    def pause_writing(self) -> None:
        """Make senders wait: the server reads more slowly than we write."""
        self._can_write = self.loop.create_future()

    def resume_writing(self) -> None:
        """Let senders continue: the server has caught up."""
        if self._can_write is not None and not self._can_write.done():
            self._can_write.set_result(None)
        self._can_write = None

    # Callbacks of httptools.

    def on_message_begin(self) -> None:
        """Begin a reply, or close the connection if no request waits for a reply.

        An unexpected reply must not become the next request's answer.
        """
        if self._head is None:
            self.transport.abort()
        self._reason = b""
        self._headers = []

    def on_status(self, status: bytes) -> None:
        """Add a part of the reason phrase."""
        self._reason += status

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header line; one after the body is a trailer and is dropped (RFC 9110 §6.5.1)."""
        if self._head is not None:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Give the reply to the caller of `ask`, unless its status is 1xx (RFC 9110 §15.2)."""
        status = self._parser.get_status_code()
        self._is_interim = 100 <= status < 200
        if self._is_interim or self._head is None:
            return
        self._overhead = 0
        reply = Reply(self, status, self._reason, self._headers)
        if self._to_head:
            # The parser would wait for the body that the head announces, so it is not used again.
            reply.body.end()
            self.transport.close()
        else:
            self._reply = reply
        self._until_close = not wire.is_framed(self._headers)
        self._headers = []
        head, self._head = self._head, None
        if not head.done():
            head.set_result(reply)

    def on_body(self, body: bytes) -> None:
        self._overhead = 0
        if self._reply is not None:
            self._reply.body.put(body)

    def on_message_complete(self) -> None:
        """End the reply's body; keep the connection for reuse, or close it if that is ruled out."""
        if self._is_interim or self._reply is None:
            return
        reply, self._reply = self._reply, None
        reply.body.end()
        if self.sending or not self._parser.should_keep_alive():
            self.transport.close()
        else:
            self._pool.keep_for_reuse(self)

    def _fail(self, why: str, kind: type[NoReply] = NoReply) -> None:
        if self._head is not None and not self._head.done():
            self._head.set_exception(kind(why))
            # Marks the exception as seen: if the client has left, nobody awaits the future.
            self._head.exception()
        self._head = None
        if self._reply is not None:
            self._reply.body.fail(Torn(why))
            self._reply = None


class Reply:
    """A reply whose head has arrived; its body may still be on its way."""

    __slots__ = ("_connection", "body", "headers", "reason", "status")

    def __init__(
        self, connection: UpstreamConnection, status: int, reason: bytes, headers: Headers
    ) -> None:
        self._connection = connection
        self.status = status
        self.reason = reason
        self.headers = headers
        self.body = BodyStream(connection.transport, connection.loop)

    def header(self, wanted: bytes) -> bytes | None:
        """Return a header's value, or None; `wanted` is its name in lower case."""
        return wire.first_value(self.headers, wanted)

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives; let other threads and calls run between its pieces.

        Raises:
            Torn: the body broke off.
        """
        while data := await self.body.wait_for_more(TURN_BYTES):
            yield data
            if self.body.has_untaken_bytes:
                let_threads_run()
                await asyncio.sleep(0)

    def read(
        self, limit: int | None = None, grown: Grown | None = None
    ) -> Coroutine[Any, Any, bytes | None]:
        """Return the whole body, or None once it is longer than `limit` bytes.

        `BodyStream.read_all` describes `grown`, and when the bytes are kept for the next reader.

        Raises:
            Torn: the body broke off.
        """
        return self.body.read_all(limit, grown)

    @property
    def fully_read(self) -> bool:
        """Return whether the whole body has arrived and was taken."""
        return self.body.exhausted

    def unread_bytes(self) -> bytes:
        """Return the bytes of a torn body that arrived and were not taken yet."""
        return self.body.take()

    def close(self) -> None:
        """Release the reply; if it has not ended, close its connection to stop the server."""
        if not self.body.ended:
            self._connection.transport.abort()

    def discard(self) -> None:
        """Release the reply; close its connection unless another request already uses that."""
        if not self.body.ended or self._connection.usable:
            self._connection.transport.abort()


class Pool:
    """Pool of connections to one server: as many as are needed at once."""

    def __init__(self, host: str, port: int, *, tls: ssl.SSLContext | None) -> None:
        """Store the server's address; connections are opened as they are needed."""
        self.host = host
        self.port = port
        default = 443 if tls else 80
        name = f"[{host}]" if ":" in host else host
        self.authority = (name if port == default else f"{name}:{port}").encode("latin-1")
        self._tls = tls
        self._idle: deque[tuple[UpstreamConnection, float]] = deque()
        self.connections: set[UpstreamConnection] = set()

    @property
    def requests_under_way(self) -> int:
        """Return the number of requests under way."""
        return len(self.connections) - len(self._idle)

    def kept_connection(self) -> UpstreamConnection | None:
        """Return a kept connection that can be used again, or None if there is none."""
        youngest = monotonic() - KEEPALIVE_S
        while self._idle:
            connection, since = self._idle.pop()
            if since > youngest and connection.usable:
                return connection
            connection.transport.close()
        return None

    async def connect(self) -> UpstreamConnection:
        """Open another connection.

        Raises:
            NotSent: no connection could be made.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await loop.create_connection(
                    lambda: UpstreamConnection(self), self.host, self.port, ssl=self._tls
                )
        except (OSError, TimeoutError) as error:
            raise NotSent(f"{type(error).__name__}: {error}"[:200]) from error
        return connection

    def keep_for_reuse(self, connection: UpstreamConnection) -> None:
        """Keep a connection, whose reply has ended, for the next request."""
        self._idle.append((connection, monotonic()))

    def sweep(self, silence_s: float) -> None:
        """Close connections idle for too long; fail calls if the server is silent `silence_s` s."""
        now = monotonic()
        while self._idle and self._idle[0][1] < now - KEEPALIVE_S:
            self._idle.popleft()[0].transport.close()
        for connection in list(self.connections):
            if connection.waits_for_reply and now - connection.last_heard > silence_s:
                connection.give_up(f"the server was silent for {silence_s:g} s")

    def close(self) -> None:
        for connection in list(self.connections):
            connection.transport.abort()


async def ask(
    pool: Pool,
    method: str,
    target: str,
    headers: Headers,
    body: bytes | BodyStream | None,
    length: int | None = None,
) -> Reply:
    """Send a request, and return the reply once its head has come.

    A body in pieces (`BodyStream`) has `length` bytes, or is sent in chunks if `length` is None. If
    the server replies before it has the whole body, the rest is still sent until the reply ends.

    Raises:
        NotSent: no connection could be made.
        NoReply: the connection broke, or was silent for too long, before the reply.
    """
    if isinstance(body, bytes):
        pieces = None
        data = wire.request_head(method, target, pool.authority, headers, len(body)) + body
    elif body is not None:
        pieces = body
        data = wire.request_head(method, target, pool.authority, headers, length)
    else:
        pieces = None
        data = wire.bodyless_head(method, target, pool.authority, headers)
    connection = pool.kept_connection() or await pool.connect()
    connection.sending = pieces is not None
    if pieces is not None:
        push = _push(connection, pieces, chunked=length is None)
        # The task first runs after `connection.ask` has sent the head.
        connection.pushing = asyncio.create_task(push)
    try:
        return await connection.ask(data, to_head=method == "HEAD")
    except asyncio.CancelledError:
        # Nobody reads the reply any more, so the server must stop generating it.
        connection.transport.abort()
        raise


async def _push(connection: UpstreamConnection, body: BodyStream, *, chunked: bool) -> None:
    try:
        while data := await body.wait_for_more():
            await connection.send_more(wire.chunk(data) if chunked else data)
    except ConnectionError:
        # The client left in the middle of its request, and half a request must not be answered.
        connection.transport.abort()
        return
    except Exception:
        log.exception("request_not_pushed")
        connection.transport.abort()
        return
    if chunked:
        await connection.send_more(wire.LAST_CHUNK)
    connection.sending = False
