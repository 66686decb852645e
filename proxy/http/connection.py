"""A client's connection: requests are parsed, and answered one after another."""

import asyncio
from collections import deque
from time import monotonic
from typing import TYPE_CHECKING, Final, cast

import httptools
import structlog

from proxy.http import wire
from proxy.http.deadlines import STEP, ClientDeadlines, Clock
from proxy.http.exchange import BodyTooSlow, ClientGone, Exchange
from proxy.http.feeding import Feeding
from proxy.http.flow import SharedBrake
from proxy.http.heads import VERSIONS, Refused, read_head, wrong_version
from proxy.http.wire import Headers

if TYPE_CHECKING:
    from proxy.http.server import Server

log = structlog.get_logger()

# Limit on a head, and on what is between the pieces of a body: chunk sizes, extensions, trailers.
MAX_HEAD_BYTES: Final = 256 * 1024
MAX_PIPELINED: Final = 8
# Seconds for which a connection is still read from before it is closed.
LINGER_S: Final = 1.0
GONE: Final = "the client closed its connection"


class Connection(asyncio.Protocol):
    """A client's connection, which takes the callbacks of asyncio and httptools."""

    transport: asyncio.Transport
    brake: SharedBrake
    _feeding: Feeding

    def __init__(self, server: "Server") -> None:
        """Begin a connection of `server`; asyncio then calls `connection_made`."""
        self.server = server
        # Kept because asyncio.get_running_loop() costs a system call each time.
        self.loop = asyncio.get_running_loop()
        self.task: asyncio.Task[None] | None = None
        self.idle_since = 0.0
        self._parser = httptools.HttpRequestParser(self)
        self._target = b""
        self._headers: Headers = []
        self._in_head = False
        # Bytes that came since the last piece of a body, or since the end of the last head.
        self._overhead = 0
        self._received = 0
        self._given = 0
        self._heads = 0
        self._head_clock, self._body_clock, self._reply_clock = Clock(), Clock(), Clock()
        self._receiving: Exchange | None = None
        self._current: Exchange | None = None
        self._waiting: deque[Exchange] = deque()
        # Too many requests wait, so reading is paused and what follows stays in the socket.
        self._held = False
        self._can_write: asyncio.Future[None] | None = None
        self._lost = False
        # A new parser is being brought to the state of the one before it.
        self._resuming = False
        self._closing = False

    @property
    def busy(self) -> bool:
        """Return whether a request is being received or answered."""
        return self._current is not None or self._receiving is not None

    @property
    def unsent(self) -> int:
        """Return the number of bytes written that the client has not taken yet."""
        return self.transport.get_write_buffer_size()

    def send(self, data: bytes) -> None:
        """Write data and count it, so that the client's progress can be computed."""
        self._given += len(data)
        self.transport.write(data)

    def answering(self, exchange: Exchange) -> bool:
        """Return whether this request's reply is due or under way."""
        return self._current is exchange and not self._lost

    # Deadlines, which the server's sweep checks.

    def sweep(self, now: float, patience: ClientDeadlines) -> None:
        """Close the connection of a client that takes or sends too slowly, or idles too long."""
        unsent = self.unsent
        if not unsent:
            self._reply_clock.reset()
        elif self._reply_clock.waited(now, self._given - unsent, STEP) > patience.write_s:
            self.server.on_late("write", patience.write_s, self._current)
            self.transport.abort()
        receiving = self._receiving
        if self._closing or self.transport.is_closing():
            return
        if receiving is not None:
            self._head_clock.reset()
            self._sweep_body(receiving, now, patience.body_s)
        elif self._in_head and not self._held:
            if self._head_clock.waited(now, self._heads) > patience.head_s:
                self.server.on_late("head", patience.head_s, None)
                self._refuse(408, f"the head did not come within {patience.head_s:g} s")
        else:
            self._head_clock.reset()
            if not self.busy and not unsent and self.idle_since < now - patience.idle_s:
                self.transport.close()

    def _sweep_body(self, receiving: Exchange, now: float, body_s: float) -> None:
        if receiving.body.braked or self._held or self._feeding.waiting or receiving.expects:
            # The client waits for us.
            self._body_clock.reset()
        elif self._body_clock.waited(now, self._received + STEP * self._heads, STEP) > body_s:
            self.server.on_late("body", body_s, receiving)
            self._receiving = None
            self._closing = True
            receiving.keep_alive = False
            if receiving.started:
                self.transport.abort()
            else:
                receiving.body.fail(
                    BodyTooSlow(f"less than {STEP} bytes of the body came within {body_s:g} s")
                )

    # Callbacks of asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast("asyncio.Transport", transport)
        self.brake = SharedBrake(self.transport)
        self._feeding = Feeding(self._feed, self.brake, self.server.turns)
        self.idle_since = monotonic()
        self.server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell all who work for the client that it is gone."""
        self._lost = self._closing = True
        self.server.connections.discard(self)
        for exchange in (self._receiving, self._current, *self._waiting):
            if exchange is not None:
                exchange.body.fail(ClientGone(GONE))
        self._waiting.clear()
        if self._can_write is not None and not self._can_write.done():
            self._can_write.set_exception(ClientGone(GONE))
            # Marks the exception as seen, for perhaps nobody awaits the future any more.
            self._can_write.exception()
        if self.task is not None:
            self.task.cancel()

    def data_received(self, data: bytes) -> None:
        """Parse the bytes; an invalid request is refused and the connection closed."""
        if self._closing:
            return
        self._received += len(data)
        self._feeding.put(data)

    def _feed(self, data: bytes) -> None:
        if self._closing:
            return
        self._overhead += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._go_on_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserCallbackError as error:
            self._refuse_for(error.__context__)
        except httptools.HttpParserError as error:
            self._refuse(400, f"not HTTP/1.1: {error}")
        else:
            if self._overhead > MAX_HEAD_BYTES:
                self._refuse(431, f"a head or trailers of more than {MAX_HEAD_BYTES} bytes")

    def pause_writing(self) -> None:
        """Make `drained` wait: the client reads more slowly than we write."""
        self._can_write = self.loop.create_future()

    def resume_writing(self) -> None:
        """Let `drained` continue: the client has caught up."""
        if self._can_write is not None and not self._can_write.done():
            self._can_write.set_result(None)
        self._can_write = None

    async def drained(self) -> None:
        """Wait while the client reads more slowly than we write.

        Raises:
            ClientGone: the client left meanwhile.
        """
        if self._can_write is not None:
            await self._can_write

    # Callbacks of httptools.

    def on_message_begin(self) -> None:
        """Begin a request."""
        self._in_head = True
        self._target = b""
        self._headers = []

    def on_url(self, url: bytes) -> None:
        """Add a part of the target."""
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header line; one after the body is a trailer and is dropped (RFC 9110 §6.5.1)."""
        if self._receiving is None:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Start to answer the request, or queue it behind the one before it."""
        if self._resuming:
            return
        self._in_head = False
        self._overhead = 0
        self._heads += 1
        version = self._parser.get_http_version()
        if version not in VERSIONS:
            raise wrong_version(version)
        # An older client only has to read until we close: no kept connection, no chunks.
        modern = version == "1.1"
        exchange = Exchange(
            self,
            self._parser.get_method().decode("latin-1"),
            self._target.decode("latin-1"),
            self._headers,
            keep_alive=modern and self._parser.should_keep_alive(),
            chunks=modern,
            expects=read_head(self._headers, modern=modern),
        )
        self._receiving = exchange
        self._headers = []
        if self._current is None:
            self._begin(exchange)
        else:
            self._waiting.append(exchange)
            if len(self._waiting) >= MAX_PIPELINED and not self._held:
                self._held = True
                self.brake.pause_reading()

    def on_body(self, body: bytes) -> None:
        """Add a piece of the body."""
        self._overhead = 0
        self._feeding.pieces += 1
        if self._receiving is not None:
            self._receiving.body.put(body)

    def on_message_complete(self) -> None:
        """End the request's body."""
        if self._receiving is not None and not self._parser.should_upgrade():
            self._receiving.body.end()
            self._receiving = None
            self._overhead = 0

    # Requests are answered one after another.

    def _begin(self, exchange: Exchange) -> None:
        self._current = exchange
        self.task = self.loop.create_task(self._run(exchange))

    async def _run(self, exchange: Exchange) -> None:
        try:
            await self.server.handle(exchange)
        except Exception:
            log.exception("handler_failed", method=exchange.method, call=exchange.call)
        finally:
            # However the handler ended, a client that is still there gets an answer.
            if self._current is exchange and not self._lost:
                self._break_off(exchange)

    def _break_off(self, exchange: Exchange) -> None:
        """Answer for a handler that ended without an answer, so that no client waits for ever."""
        if exchange.started:
            self.transport.abort()
        else:
            exchange.keep_alive = False
            why = "the proxy failed to answer; its log says why"
            self._give(500, why, exchange.method, exchange.target)
            self.answered(exchange)

    def answered(self, exchange: Exchange) -> None:
        """Begin the next request, or close the connection, after a reply was sent to its end."""
        if self._current is not exchange:
            return
        self._current = None
        self.task = None
        self.idle_since = monotonic()
        # What the handler left unread would keep the connection paused.
        exchange.body.take()
        if not exchange.keep_alive or (not exchange.body.ended and self._receiving is exchange):
            # The rest of an unread body would be parsed as a request.
            if exchange.body.ended:
                self.transport.close()
            else:
                self._close_gently()
        elif self._waiting:
            if self._held and len(self._waiting) <= MAX_PIPELINED:
                self._held = False
                self.brake.resume_reading()
            self._begin(self._waiting.popleft())

    def _refuse_for(self, error: BaseException | None) -> None:
        """Refuse a request for the error that a callback raised."""
        if isinstance(error, Refused):
            self._refuse(error.status, error.why)
        else:
            log.error("request_not_read", exc_info=error)
            self._refuse(500, "the proxy failed to read the request; its log says why")

    def _refuse(self, status: int, why: str) -> None:
        """Answer with an error and close: nothing after an invalid request can be parsed.

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
            method = self._parser.get_method().decode("latin-1")
            self._give(status, why, method, self._target.decode("latin-1"))
            self._close_gently()

    def _give(self, status: int, why: str, method: str, target: str) -> None:
        body = self.server.explain(target, status, why)
        self.send(wire.refusal(status, body, bodyless=method == "HEAD"))

    def _close_gently(self) -> None:
        """Close once the client has had time to read its reply.

        While the client still sends, closing at once would reset the connection, and the client
        could lose the reply (RFC 9112 §9.6).
        """
        self._closing = True
        if self._current is not None and self.task is not None:
            self.task.cancel()
        self._receiving = self._current = None
        if not self.transport.is_closing():
            self.transport.write_eof()
            self.loop.call_later(LINGER_S, self.transport.close)

    # An offer to upgrade is ignored (RFC 9110 §7.8 allows it).

    def _go_on_without_upgrade(self, rest: bytes) -> None:
        """Read the body with a new parser: the old one takes what follows for another protocol."""
        exchange = self._receiving
        if exchange is None:
            self._refuse(400, "an offer to upgrade without a request")
            return
        framing = [pair for pair in exchange.headers if pair[0].lower() in wire.FRAMING]
        self._parser = httptools.HttpRequestParser(self)
        self._resuming = True
        self._parser.feed_data(wire.head(b"POST / HTTP/1.1", framing))
        self._resuming = False
        if rest:
            self._feed(rest)
