"""Serve HTTP/1.1: a listening socket, its connections, and the deadlines of their clients.

A connection's requests are answered one after another. No deadline has a timer of its own: a sweep
looks at every connection now and then and checks whether it made progress, so a deadline is late by
at most two sweeps.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from ipaddress import IPv6Address, ip_address
from math import inf
from time import monotonic
from typing import Any, Final, cast

import msgspec
import structlog

from proxy.http import wire
from proxy.http.exchange import BodyTooSlow, ClientGone, Exchange, SharedBrake
from proxy.http.parsing import Feeding, RequestParser, SlowWork

log = structlog.get_logger()


def is_loopback(peer: Any) -> bool:
    """Return whether a connection's other end is this machine.

    `peer` is the transport's `peername`: a tuple whose first element is an address. Anything else
    counts as another machine.
    """
    if not isinstance(peer, tuple) or not peer:
        return False
    try:
        # An address may name its interface: fe80::1%eth0.
        address = ip_address(str(peer[0]).partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback


# Bytes of a body, either way, that count as progress. A limit on the whole body would hit a large
# file on a slow line; a limit on silence alone would let one byte a minute hold a connection.
STEP_BYTES: Final = 16 * 1024
# Seconds after which an idle connection is closed.
IDLE_S: Final = 75.0
# Seconds of silence after which a stream gets a ping, where its API has one: servers are silent
# while they work on a long prompt, and clients and balancers give up on silent connections.
PING_S: Final = 60.0
# Bounds of the seconds between two sweeps.
SHORTEST_SWEEP_S: Final = 0.05
LONGEST_SWEEP_S: Final = 5.0


class ClientDeadlines(msgspec.Struct, frozen=True):
    """Seconds that a client may take for a head, and for each `STEP_BYTES` bytes of a body.

    `body_s` is for the request's body, `write_s` for the reply: it counts only while unsent bytes
    wait for the client. `idle_s` is for a connection without a request.
    """

    head_s: float = 60.0
    body_s: float = 300.0
    write_s: float = 300.0
    idle_s: float = IDLE_S

    def limited_to(self, seconds: float) -> "ClientDeadlines":
        """Return the same deadlines, but none longer than `seconds`."""
        return ClientDeadlines(*(min(limit, seconds) for limit in msgspec.structs.astuple(self)))

    @property
    def sweep_s(self) -> float:
        """Return the seconds between two sweeps of the connections."""
        shortest = min(self.head_s, self.body_s, self.write_s, self.idle_s)
        return min(max(shortest / 10, SHORTEST_SWEEP_S), LONGEST_SWEEP_S)


class StallTimer:
    """Timer of how long a count has not grown by a step."""

    __slots__ = ("_count", "_since")

    def __init__(self) -> None:
        self._count = -1
        self._since = 0.0

    def reset(self) -> None:
        """Restart the time at the next call of `stalled_for`, as nothing is waited for now."""
        self._count = -1

    def stalled_for(self, now: float, count: int, step: int = 1) -> float:
        """Return the seconds since the first call, or since `count` last grew by `step`."""
        if self._count < 0 or count - self._count >= step:
            self._count = count
            self._since = now
        return now - self._since


# Most requests that wait for earlier ones on the same connection.
MAX_PIPELINED: Final = 8
# Seconds for which a connection is still read before it is closed.
LINGER_S: Final = 1.0
GONE: Final = "the client closed its connection"


class Connection(asyncio.Protocol):
    """Serve a client's connection; asyncio calls it back."""

    transport: asyncio.Transport
    brake: SharedBrake
    _parser: RequestParser
    _feeding: Feeding

    def __init__(self, server: "Server") -> None:
        self.server = server
        # Kept because asyncio.get_running_loop() costs a system call each time.
        self.loop = asyncio.get_running_loop()
        self.task: asyncio.Task[None] | None = None
        self.idle_since = 0.0
        self._received = 0
        self._written = 0
        self._head_clock, self._body_clock, self._reply_clock = (
            StallTimer(),
            StallTimer(),
            StallTimer(),
        )
        self._silence_clock = StallTimer()
        self._current: Exchange | None = None
        self._waiting: deque[Exchange] = deque()
        # Too many requests wait, so reading is paused and further ones stay in the socket.
        self._queue_full = False
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
    def unsent_bytes(self) -> int:
        """Return the number of written bytes that were not sent to the client yet."""
        return self.transport.get_write_buffer_size()

    @property
    def peer_address(self) -> str | None:
        """Return the address of the client's end, if it has one."""
        name = self.transport.get_extra_info("peername")
        return str(name[0]) if isinstance(name, tuple) and name else None

    @property
    def is_local(self) -> bool:
        """Return whether the client's end is on this machine."""
        if self._local is None:
            self._local = is_loopback(self.transport.get_extra_info("peername"))
        return self._local

    def send(self, data: bytes) -> None:
        """Write data and count it, so that the client's progress can be computed."""
        self._written += len(data)
        self.transport.write(data)

    def is_answering(self, exchange: Exchange) -> bool:
        """Return whether this request is being answered and the client is still connected."""
        return self._current is exchange and not self._lost

    # Deadlines, which the server's sweep checks.

    def sweep(self, now: float, patience: ClientDeadlines) -> None:
        """Close the connection of a client that takes or sends too slowly, or idles too long.

        A client that waits for a silent stream gets a ping.
        """
        unsent = self.unsent_bytes
        if not unsent:
            self._reply_clock.reset()
            if (
                self._current is not None
                and self._silence_clock.stalled_for(now, self._written) > PING_S
            ):
                self._current.send_ping()
        elif (
            self._reply_clock.stalled_for(now, self._written - unsent, STEP_BYTES)
            > patience.write_s
        ):
            self.server.on_late("write", patience.write_s, self._current)
            self.transport.abort()
        receiving = self._parser.receiving
        if self.closing or self.transport.is_closing():
            return
        if receiving is not None:
            self._head_clock.reset()
            self._sweep_body(receiving, now, patience.body_s)
        elif self._parser.in_head and not self._queue_full:
            if self._head_clock.stalled_for(now, self._parser.heads) > patience.head_s:
                self.server.on_late("head", patience.head_s, None)
                self.refuse(408, f"its head did not come within {patience.head_s:g} s")
        else:
            self._head_clock.reset()
            if not self.busy and not unsent and self.idle_since < now - patience.idle_s:
                self.transport.close()

    def _sweep_body(self, receiving: Exchange, now: float, body_s: float) -> None:
        progress = self._received + STEP_BYTES * self._parser.heads
        if receiving.body.braked or self._queue_full or self._feeding.waiting or receiving.expects:
            # The client waits for us.
            self._body_clock.reset()
        elif self._body_clock.stalled_for(now, progress, STEP_BYTES) > body_s:
            self.server.on_late("body", body_s, receiving)
            self._parser.stop_receiving()
            self.closing = True
            receiving.keep_alive = False
            if receiving.started:
                self.transport.abort()
            else:
                receiving.body.fail(
                    BodyTooSlow(
                        f"less than {STEP_BYTES} bytes of the body came within {body_s:g} s"
                    )
                )

    # Callbacks of asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.brake = SharedBrake(self.transport)
        self._parser = RequestParser(self)
        self._feeding = self._parser.feeding
        self.idle_since = monotonic()
        self.server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all work for the client, which is gone."""
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
        # Their exceptions refer to the handler's frames, which hold the reply in memory.
        self.task = self._can_write = None

    def data_received(self, data: bytes) -> None:
        """Parse the bytes; an invalid request is refused and the connection closed."""
        if self.closing:
            return
        self._received += len(data)
        self._feeding.put(data)

    def pause_writing(self) -> None:
        """Make `wait_until_drained` wait: the client reads more slowly than we write."""
        self._can_write = self.loop.create_future()

    def resume_writing(self) -> None:
        """Let `wait_until_drained` continue: the client has caught up."""
        if self._can_write is not None and not self._can_write.done():
            self._can_write.set_result(None)
        self._can_write = None

    async def wait_until_drained(self) -> None:
        """Wait while the client reads more slowly than we write.

        Raises:
            ClientGone: the client left meanwhile.
        """
        if self._can_write is not None:
            await self._can_write

    # Requests are answered one after another.

    def start_or_queue(self, exchange: Exchange) -> None:
        """Start to answer a request whose head has come, or queue it behind earlier requests."""
        if self._current is None:
            self._begin(exchange)
            return
        self._waiting.append(exchange)
        if len(self._waiting) >= MAX_PIPELINED and not self._queue_full:
            self._queue_full = True
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
                self._answer_for_handler(exchange)

    def _answer_for_handler(self, exchange: Exchange) -> None:
        """Send a 500 if the handler ended without a reply; abort if it left a reply unfinished."""
        if exchange.started:
            self.transport.abort()
        else:
            exchange.keep_alive = False
            why = "the proxy failed to answer; its log says why"
            self._send_refusal(500, why, exchange.method, exchange.target)
            self.end_reply(exchange)

    def end_reply(self, exchange: Exchange) -> None:
        """Start the next request or close the connection, now that a reply is complete."""
        if self._current is not exchange:
            return
        self._current = None
        self.task = None
        self.idle_since = monotonic()
        # Unread bytes would keep the connection paused.
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
            if self._queue_full and len(self._waiting) <= MAX_PIPELINED:
                self._queue_full = False
                self.brake.resume_reading()
            self._begin(self._waiting.popleft())

    def refuse(self, status: int, why: str) -> None:
        """Answer with an error and close: nothing after an invalid request can be parsed.

        If an earlier request is being answered, its reply is finished, and no error is sent.
        Queued requests are dropped.
        """
        self.closing = True
        self._waiting.clear()
        broken = self._parser.stop_receiving()
        if broken is not None:
            broken.body.fail(ClientGone("the client's request broke off"))
        current = self._current
        if current is not None and current is not broken:
            current.keep_alive = False
        elif current is not None and current.started:
            self.transport.abort()
        else:
            request = broken or self._parser
            self._send_refusal(status, why, request.method, request.target)
            self._close_gently()

    def _send_refusal(self, status: int, why: str, method: str, target: str) -> None:
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
        self._parser.stop_receiving()
        self._current = None
        if not self.transport.is_closing():
            self.transport.write_eof()
            self.loop.call_later(LINGER_S, self.transport.close)


Handler = Callable[[Exchange], Awaitable[None]]
# Returns the body of a refusal for its target, its status and the reason.
Explain = Callable[[str, int, str], bytes]
# Called for a client that took too long, with `head`, `body` or `write`, the seconds that were
# allowed, and the request if there is one.
OnLate = Callable[[str, float, Exchange | None], None]

# Seconds between two checks whether all requests are finished.
FINISHED_CHECK_S: Final = 0.02
# Seconds that a cancelled handler may take to clean up.
BREAK_OFF_S: Final = 2.0


class Server:
    """All connections of one listening socket, and the handler of their requests."""

    def __init__(
        self,
        handle: Handler,
        *,
        patience: ClientDeadlines,
        explain: Explain,
        on_late: OnLate,
    ) -> None:
        """Store the callbacks that answer a request, word a refusal, and count slow clients."""
        self.handle = handle
        self.explain = explain
        self.on_late = on_late
        self.draining = False
        self.turns = SlowWork()
        self.connections: set[Connection] = set()
        self._patience = patience
        self._break_off_at = inf
        self._listening: asyncio.Server | None = None
        self._sweeping: asyncio.Task[None] | None = None

    async def listen(self, sock: socket.socket, backlog: int) -> None:
        """Accept connections at a bound socket."""
        self._listening = await asyncio.get_running_loop().create_server(
            partial(Connection, self), sock=sock, backlog=backlog
        )
        self._sweeping = asyncio.create_task(self._sweep(), name="pawl-http-sweep")

    def stop_accepting(self) -> None:
        """Take no new connection; open ones get their answers, with `Connection: close`."""
        self.draining = True
        if self._listening is not None:
            self._listening.close()

    def finish_within(self, seconds: float) -> None:
        """Break off requests still under way after `seconds`; an earlier time set before stays.

        From now on, a client without progress for half that time is broken off.
        """
        self._break_off_at = min(self._break_off_at, monotonic() + seconds)
        self._patience = self._patience.limited_to(seconds / 2)

    @property
    def is_ending(self) -> bool:
        """Return whether `finish_within` has set a time to break off requests."""
        return self._break_off_at < inf

    async def wait_until_finished(self) -> None:
        """Wait until every request is answered, or until it is time to break them off.

        A kept connection may have its next request on the way. For a moment it is still answered,
        with `Connection: close`; only then is the connection closed.
        """
        linger_until = monotonic() + LINGER_S
        next_sweep = 0.0
        while self.connections and (now := monotonic()) < self._break_off_at:
            if now >= next_sweep:
                self._check_deadlines(now)
                next_sweep = now + self._patience.sweep_s
            if now >= linger_until:
                for connection in [c for c in self.connections if not c.busy]:
                    connection.transport.close()
                # A connection whose reply is still being sent is idle, but not done.
                if not any(c.busy or c.unsent_bytes for c in self.connections):
                    return
            await asyncio.sleep(FINISHED_CHECK_S)

    async def close(self) -> None:
        """Break off the remaining requests, and wait for their handlers to end."""
        self.stop_accepting()
        if self._sweeping is not None:
            self._sweeping.cancel()
        unfinished = [c.task for c in self.connections if c.task is not None]
        if unfinished:
            log.warning(
                "calls_broken_off",
                calls=len(unfinished),
                reason="stop deadline exceeded",
            )
        for connection in list(self.connections):
            is_done = not (connection.busy or connection.unsent_bytes)
            end = connection.transport.close if is_done else connection.transport.abort
            end()
        if unfinished:
            _, stuck = await asyncio.wait(unfinished, timeout=BREAK_OFF_S)
            if stuck:
                log.error("handlers_stuck", handlers=len(stuck), waited_s=BREAK_OFF_S)

    async def _sweep(self) -> None:
        """Check the connections' deadlines for ever, with one timer for all of them."""
        while True:
            await asyncio.sleep(self._patience.sweep_s)
            self._check_deadlines(monotonic())

    def _check_deadlines(self, now: float) -> None:
        for connection in list(self.connections):
            connection.sweep(now, self._patience)
