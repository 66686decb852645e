"""Answer the requests of a client's connection one after another, within its deadlines."""

import asyncio
from collections import deque
from time import monotonic
from typing import TYPE_CHECKING, Final, cast

import structlog

from proxy.http import wire
from proxy.http.deadlines import STEP, ClientDeadlines, Clock
from proxy.http.exchange import BodyTooSlow, ClientGone, Exchange
from proxy.http.flow import SharedBrake
from proxy.http.parsing import Feeding, RequestParser
from proxy.http.peers import is_loopback

if TYPE_CHECKING:
    from proxy.http.server import Server

log = structlog.get_logger()

MAX_PIPELINED: Final = 8
# Seconds for which a connection is still read from before it is closed.
LINGER_S: Final = 1.0
GONE: Final = "the client closed its connection"


class Connection(asyncio.Protocol):
    """Serve a client's connection; asyncio calls it back."""

    transport: asyncio.Transport
    brake: SharedBrake
    _parser: RequestParser
    _feeding: Feeding

    def __init__(self, server: "Server") -> None:
        """Begin a connection of `server`; asyncio then calls `connection_made`."""
        self.server = server
        # Kept because asyncio.get_running_loop() costs a system call each time.
        self.loop = asyncio.get_running_loop()
        self.task: asyncio.Task[None] | None = None
        self.idle_since = 0.0
        self._received = 0
        self._given = 0
        self._head_clock, self._body_clock, self._reply_clock = Clock(), Clock(), Clock()
        self._current: Exchange | None = None
        self._waiting: deque[Exchange] = deque()
        # Too many requests wait, so reading is paused and what follows stays in the socket.
        self._held = False
        self._can_write: asyncio.Future[None] | None = None
        self._lost = False
        self._local: bool | None = None
        # No more requests are taken.
        self.closing = False

    @property
    def busy(self) -> bool:
        """Return whether a request is being received or answered."""
        return self._current is not None or self._parser.receiving is not None

    @property
    def unsent(self) -> int:
        """Return the number of bytes written that the client has not taken yet."""
        return self.transport.get_write_buffer_size()

    @property
    def local(self) -> bool:
        """Return whether the client's end is on this machine."""
        if self._local is None:
            self._local = is_loopback(self.transport.get_extra_info("peername"))
        return self._local

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
        receiving = self._parser.receiving
        if self.closing or self.transport.is_closing():
            return
        if receiving is not None:
            self._head_clock.reset()
            self._sweep_body(receiving, now, patience.body_s)
        elif self._parser.in_head and not self._held:
            if self._head_clock.waited(now, self._parser.heads) > patience.head_s:
                self.server.on_late("head", patience.head_s, None)
                self.refuse(408, f"the head did not come within {patience.head_s:g} s")
        else:
            self._head_clock.reset()
            if not self.busy and not unsent and self.idle_since < now - patience.idle_s:
                self.transport.close()

    def _sweep_body(self, receiving: Exchange, now: float, body_s: float) -> None:
        came = self._received + STEP * self._parser.heads
        if receiving.body.braked or self._held or self._feeding.waiting or receiving.expects:
            # The client waits for us.
            self._body_clock.reset()
        elif self._body_clock.waited(now, came, STEP) > body_s:
            self.server.on_late("body", body_s, receiving)
            self._parser.drop()
            self.closing = True
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
        self._parser = RequestParser(self)
        self._feeding = self._parser.feeding
        self.idle_since = monotonic()
        self.server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell all who work for the client that it is gone."""
        self._lost = self.closing = True
        self.server.connections.discard(self)
        for exchange in (self._parser.receiving, self._current, *self._waiting):
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
        if self.closing:
            return
        self._received += len(data)
        self._feeding.put(data)

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

    # Requests are answered one after another.

    def take(self, exchange: Exchange) -> None:
        """Start to answer a request whose head has come, or queue it behind the one before it."""
        if self._current is None:
            self._begin(exchange)
            return
        self._waiting.append(exchange)
        if len(self._waiting) >= MAX_PIPELINED and not self._held:
            self._held = True
            self.brake.pause_reading()

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
        if not exchange.keep_alive or (
            not exchange.body.ended and self._parser.receiving is exchange
        ):
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

    def refuse(self, status: int, why: str) -> None:
        """Answer with an error and close: nothing after an invalid request can be parsed.

        Requests before it are answered first.
        """
        self.closing = True
        self._waiting.clear()
        broken = self._parser.drop()
        if broken is not None:
            broken.body.fail(ClientGone("the client's request broke off"))
        current = self._current
        if current is not None and current is not broken:
            current.keep_alive = False
        elif current is not None and current.started:
            self.transport.abort()
        else:
            asked = broken or self._parser
            self._give(status, why, asked.method, asked.target)
            self._close_gently()

    def _give(self, status: int, why: str, method: str, target: str) -> None:
        body = self.server.explain(target, status, why)
        self.send(wire.refusal(status, body, bodyless=method == "HEAD"))

    def _close_gently(self) -> None:
        """Close once the client has had time to read its reply.

        While the client still sends, closing at once would reset the connection, and the client
        could lose the reply (RFC 9112 §9.6).
        """
        self.closing = True
        if self._current is not None and self.task is not None:
            self.task.cancel()
        self._parser.drop()
        self._current = None
        if not self.transport.is_closing():
            self.transport.write_eof()
            self.loop.call_later(LINGER_S, self.transport.close)
