"""The server's side: connections, requests one after another, replies with back-pressure."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from time import monotonic
from typing import Final, cast

import httptools

from proxy.http import wire
from proxy.http.exchange import ClientGone, Exchange
from proxy.http.wire import Headers

MAX_HEAD_BYTES: Final = 256 * 1024
MAX_PIPELINED: Final = 8
IDLE_S: Final = 75.0
# How long a connection that is to be closed is still listened to.
LINGER_S: Final = 1.0

Handler = Callable[[Exchange], Awaitable[None]]


class Server:
    """All connections of one listening socket, and what is done with their requests."""

    def __init__(self, handle: Handler) -> None:
        self.handle = handle
        self.draining = False
        self.connections: set[Connection] = set()
        self._listening: asyncio.Server | None = None
        self._sweeping: asyncio.Task[None] | None = None

    async def listen(self, **where: object) -> None:
        """Accept connections; `where` as `loop.create_server` takes it.

        Raises:
            OSError: the port is taken.
        """
        loop = asyncio.get_running_loop()
        create = cast("Callable[..., Awaitable[asyncio.Server]]", loop.create_server)
        self._listening = await create(partial(Connection, self), **where)
        self._sweeping = asyncio.create_task(self._sweep(), name="pawl-http-sweep")

    def stop_accepting(self) -> None:
        """Take no new connection; those there are get their answers, and `close` with them."""
        self.draining = True
        if self._listening is not None:
            self._listening.close()

    async def finished(self, patience_s: float) -> None:
        """Wait until every request is answered, or `patience_s` is over.

        A kept connection may have its next request on the way: for a moment it is still
        answered, with `close`; only then is the connection closed.
        """
        linger = monotonic() + LINGER_S
        deadline = monotonic() + patience_s
        while self.connections and monotonic() < deadline:
            if monotonic() >= linger:
                for connection in [c for c in self.connections if not c.busy]:
                    connection.transport.close()
                if not any(c.busy for c in self.connections):
                    return
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        """Break off what is left, and wait for its handlers to end."""
        self.stop_accepting()
        if self._sweeping is not None:
            self._sweeping.cancel()
        left = [c for c in self.connections if c.task is not None]
        for connection in list(self.connections):
            if connection.busy:
                connection.transport.abort()
            else:
                connection.transport.close()
        await asyncio.gather(*(c.task for c in left if c.task), return_exceptions=True)

    async def _sweep(self) -> None:
        """Look after connections that have had nothing to say for a while."""
        while True:
            await asyncio.sleep(IDLE_S / 10)
            for connection in list(self.connections):
                connection.sweep(monotonic() - IDLE_S)


class Connection(asyncio.Protocol):
    """One client's connection: an httptools callback target."""

    transport: asyncio.Transport

    def __init__(self, server: Server) -> None:
        self.server = server
        # Asking for it costs a system call each time.
        self.loop = asyncio.get_running_loop()
        self.task: asyncio.Task[None] | None = None
        self.idle_since = 0.0
        self._heard = 0.0
        self._parser = httptools.HttpRequestParser(self)
        self._target = b""
        self._headers: Headers = []
        self._head_bytes = 0
        self._receiving: Exchange | None = None
        self._current: Exchange | None = None
        self._waiting: deque[Exchange] = deque()
        self._can_write: asyncio.Future[None] | None = None
        self._lost = False
        # While a new parser is brought to where the one before it stopped.
        self._resuming = False
        self._closing = False

    @property
    def busy(self) -> bool:
        """Whether a request is being received or answered."""
        return self._current is not None or self._receiving is not None

    def sweep(self, before: float) -> None:
        """Close it if it was idle since `before`, or said nothing more of a request it began."""
        if not self.busy:
            if self.idle_since < before:
                self.transport.close()
        elif self._heard < before and self._receiving and not self._receiving.body.braked:
            self._refuse(408)

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast("asyncio.Transport", transport)
        self.idle_since = monotonic()
        self.server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone: whoever works for it must know at once."""
        self._lost = True
        self.server.connections.discard(self)
        for exchange in (self._receiving, self._current, *self._waiting):
            if exchange is not None:
                exchange.body.fail(ClientGone("the client closed its connection"))
        self._waiting.clear()
        if self._can_write is not None and not self._can_write.done():
            self._can_write.set_exception(ClientGone("the client closed its connection"))
            # Nobody may be waiting for it any more.
            self._can_write.exception()
        if self.task is not None:
            self.task.cancel()

    def data_received(self, data: bytes) -> None:
        """Parse; a request that is none is answered and the connection closed."""
        if self._closing:
            return
        self._heard = monotonic()
        if self._receiving is None:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._go_on_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse(400)
        else:
            if self._receiving is None and self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(431)

    def pause_writing(self) -> None:
        """The client reads more slowly than we write."""
        self._can_write = self.loop.create_future()

    def resume_writing(self) -> None:
        """It has caught up."""
        if self._can_write is not None and not self._can_write.done():
            self._can_write.set_result(None)
        self._can_write = None

    async def drained(self) -> None:
        """Wait while the client is slower than we are.

        Raises:
            ClientGone: it left meanwhile.
        """
        if self._can_write is not None:
            await self._can_write

    # httptools' side

    def on_message_begin(self) -> None:
        """A request begins."""
        self._target = b""
        self._headers = []

    def on_url(self, url: bytes) -> None:
        """A part of the target."""
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header line."""
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """The head is there: the request can be worked on."""
        self._head_bytes = 0
        if self._resuming:
            return
        # Of what is not HTTP/1.1 nothing is asked but that it reads until we close.
        modern = self._parser.get_http_version() == "1.1"
        exchange = Exchange(
            self,
            self._parser.get_method().decode("latin-1"),
            self._target.decode("latin-1"),
            self._headers,
            keep_alive=modern and self._parser.should_keep_alive(),
            chunks=modern,
            expects=self._read_head(),
        )
        self._receiving = exchange
        # What comes after a body is no header (RFC 9110 §6.5.1): it is left out.
        self._headers = []
        if self._current is None:
            self._begin(exchange)
        else:
            self._waiting.append(exchange)
            if len(self._waiting) >= MAX_PIPELINED:
                self.transport.pause_reading()

    def _read_head(self) -> bool:
        """Whether the client waits to be told to send its body.

        Raises:
            ValueError: its body is in a coding that we cannot pass on as it is.
        """
        expects = False
        for name, value in self._headers:
            if len(name) == 6 and name.lower() == b"expect":
                expects = value.lower() == b"100-continue"
            elif name.lower() == b"transfer-encoding" and value.lower() != b"chunked":
                raise ValueError("a transfer coding that is not chunked")
        return expects

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        if self._receiving is not None:
            self._receiving.body.put(body)

    def on_message_complete(self) -> None:
        """The request is there to its end."""
        if self._receiving is not None and not self._parser.should_upgrade():
            self._receiving.body.end()
            self._receiving = None

    # requests, one after another

    def _begin(self, exchange: Exchange) -> None:
        self._current = exchange
        self.task = self.loop.create_task(self._run(exchange))

    async def _run(self, exchange: Exchange) -> None:
        await self.server.handle(exchange)
        if self._current is exchange and not self._lost:
            # A handler that answered nothing leaves nothing to wait for.
            self.transport.abort()

    def answered(self, exchange: Exchange) -> None:
        """A reply was given to its end: the next request, if it is there already."""
        if self._current is not exchange:
            return
        self._current = None
        self.task = None
        self.idle_since = monotonic()
        if not exchange.keep_alive or (not exchange.body.ended and self._receiving is exchange):
            # What a client still sends of a body nobody wants would be read as a request.
            if exchange.body.ended:
                self.transport.close()
            else:
                self._close_gently()
        elif self._waiting:
            if len(self._waiting) == MAX_PIPELINED:
                self.transport.resume_reading()
            self._begin(self._waiting.popleft())

    def _refuse(self, status: int) -> None:
        """What came is not HTTP as we speak it; nothing can be made of what follows either.

        Requests before it are answered first.
        """
        self._closing = True
        self._waiting.clear()
        broken, self._receiving = self._receiving, None
        if broken is not None:
            broken.body.fail(ClientGone("the client's request broke off"))
        current = self._current
        if current is not None and current is not broken:
            current.keep_alive = False
        elif current is not None and current.started:
            self.transport.abort()
        else:
            self.transport.write(wire.refusal_head(status))
            self._close_gently()

    def _close_gently(self) -> None:
        """Close once the client has read what it was told.

        While it still sends, closing at once would be a reset, and that takes the reply away
        from it (RFC 9112 §9.6).
        """
        self._closing = True
        if self._current is not None and self.task is not None:
            self.task.cancel()
        self._receiving = self._current = None
        if not self.transport.is_closing():
            self.transport.write_eof()
            self.loop.call_later(LINGER_S, self.transport.close)

    # an upgrade that is offered and not taken (RFC 9110 §7.8: it may be ignored)

    def _go_on_without_upgrade(self, rest: bytes) -> None:
        """The parser takes what follows for another protocol: a new one reads the body."""
        exchange = self._receiving
        if exchange is None:
            self._refuse(400)
            return
        framing = [pair for pair in exchange.headers if pair[0].lower() in wire.FRAMING]
        self._parser = httptools.HttpRequestParser(self)
        self._resuming = True
        self._parser.feed_data(wire.head(b"POST / HTTP/1.1", framing))
        self._resuming = False
        if rest:
            self.data_received(rest)
