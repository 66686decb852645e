"""Serve HTTP/1.1: a listening socket, its connections, and their deadlines."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from math import inf
from time import monotonic
from typing import Final, cast

import structlog

from proxy.http.connection import LINGER_S, Connection
from proxy.http.deadlines import ClientDeadlines
from proxy.http.exchange import Exchange
from proxy.http.parsing import Turns

log = structlog.get_logger()

Handler = Callable[[Exchange], Awaitable[None]]
# Returns the body of a refusal for its target, its status and the reason.
Explain = Callable[[str, int, str], bytes]
# Called for a client that took too long, with `head`, `body` or `write`, the seconds that were
# allowed, and the request if there is one.
OnLate = Callable[[str, float, Exchange | None], None]

LOOK_S: Final = 0.02
# Seconds that a cancelled handler may take to clean up.
BREAK_OFF_S: Final = 2.0


def _no_words(_target: str, _status: int, _why: str) -> bytes:
    return b""


def _nobody_told(_what: str, _allowed_s: float, _exchange: Exchange | None) -> None:
    """Count nothing."""


class Server:
    """Keep all connections of one listening socket, and the handler of their requests."""

    def __init__(
        self,
        handle: Handler,
        *,
        patience: ClientDeadlines | None = None,
        explain: Explain = _no_words,
        on_late: OnLate = _nobody_told,
    ) -> None:
        """Store the handler; `listen` opens the socket.

        Args:
            handle: answers one request.
            patience: the deadlines of clients.
            explain: returns the body of a refusal.
            on_late: is called for a client that took too long.
        """
        self.handle = handle
        self.explain = explain
        self.on_late = on_late
        self.draining = False
        self.turns = Turns()
        self.connections: set[Connection] = set()
        self._patience = patience or ClientDeadlines()
        self._break_off_at = inf
        self._listening: asyncio.Server | None = None
        self._sweeping: asyncio.Task[None] | None = None

    async def listen(self, **where: object) -> None:
        """Accept connections; `where` holds arguments of `loop.create_server`.

        Raises:
            OSError: the port is taken.
        """
        loop = asyncio.get_running_loop()
        create = cast("Callable[..., Awaitable[asyncio.Server]]", loop.create_server)
        self._listening = await create(partial(Connection, self), **where)
        self._sweeping = asyncio.create_task(self._sweep(), name="pawl-http-sweep")

    def stop_accepting(self) -> None:
        """Take no new connection; open ones get their answers, with `Connection: close`."""
        self.draining = True
        if self._listening is not None:
            self._listening.close()

    def finish_within(self, seconds: float) -> None:
        """Break off what is still under way after `seconds`; the earliest such deadline counts.

        From now on a client without progress is broken off after half of that at the latest.
        """
        self._break_off_at = min(self._break_off_at, monotonic() + seconds)
        self._patience = self._patience.at_most(seconds / 2)

    @property
    def ending(self) -> bool:
        """Return whether a time is set at which calls under way are broken off."""
        return self._break_off_at < inf

    async def finished(self) -> None:
        """Wait until every request is answered, or until it is time to break them off.

        A kept connection may have its next request on the way. For a moment it is still answered,
        with `Connection: close`; only then is the connection closed.
        """
        linger = monotonic() + LINGER_S
        look_at = 0.0
        while self.connections and (now := monotonic()) < self._break_off_at:
            if now >= look_at:
                self._look(now)
                look_at = now + self._patience.sweep_s
            if now >= linger:
                for connection in [c for c in self.connections if not c.busy]:
                    connection.transport.close()
                # A connection whose reply is still being sent is idle, but not done.
                if not any(c.busy or c.unsent for c in self.connections):
                    return
            await asyncio.sleep(LOOK_S)

    async def close(self) -> None:
        """Break off what is left, and wait for the handlers to end."""
        self.stop_accepting()
        if self._sweeping is not None:
            self._sweeping.cancel()
        unfinished = [c.task for c in self.connections if c.task is not None]
        if unfinished:
            log.warning(
                "calls_broken_off",
                calls=len(unfinished),
                reason="the time allowed for stopping was over",
            )
        for connection in list(self.connections):
            is_done = not (connection.busy or connection.unsent)
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
            self._look(monotonic())

    def _look(self, now: float) -> None:
        for connection in list(self.connections):
            connection.sweep(now, self._patience)
