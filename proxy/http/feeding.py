"""Give a connection's bytes to its parser, and no turn of the event loop more than it can take.

Of 256 KB in chunks of two bytes the parser makes 37,000 pieces, which takes longer than an ordinary
call. So bytes are parsed in slices. Connections whose slices fall into many pieces, or whose body
is long, wait for each other, and between two of their turns the event loop does other work for as
long.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Final

from proxy.http.flow import Brake

SLICE: Final = 16 * 1024
# A slice that falls into more pieces of a body than this takes long to parse.
MANY_PIECES: Final = 128
# Of a body longer than this the rest is taken in turns: of sixteen that come at once, each turn of
# the event loop would copy 4 MB otherwise.
LONG_BODY: Final = 2**20


class Turns:
    """Work that takes long, of all connections: one piece at a time, with as long a rest after."""

    def __init__(self) -> None:
        """Begin with nothing to do."""
        self._waiting: deque[Callable[[], None]] = deque()
        self._scheduled = False
        self._rested_at = 0.0

    def wait(self, work: Callable[[], None]) -> None:
        """Have `work` done when it is its turn."""
        self._waiting.append(work)
        if not self._scheduled:
            self._schedule()

    def _schedule(self) -> None:
        self._scheduled = True
        rest_s = max(0.0, self._rested_at - monotonic())
        asyncio.get_running_loop().call_later(rest_s, self._next)

    def _next(self) -> None:
        began = monotonic()
        try:
            self._waiting.popleft()()
        finally:
            now = monotonic()
            self._rested_at = now + (now - began)
            self._scheduled = False
            if self._waiting:
                self._schedule()


class Feeding:
    """Keep the bytes of one connection that its parser has not seen yet."""

    def __init__(self, feed: Callable[[bytes], None], source: Brake, turns: Turns) -> None:
        """Begin with no bytes.

        Args:
            feed: gives bytes to the parser.
            source: where the bytes come from; it is paused while some wait.
            turns: shared with the other connections.
        """
        self._feed = feed
        self._source = source
        self._turns = turns
        self._unseen = b""
        self._takes_long = False
        # Number of pieces that the parser has made of the present slice; it counts them here.
        self.pieces = 0
        # Number of bytes of the present body that have come; the parser counts them here.
        self.body_bytes = 0
        self.waiting = False

    def put(self, data: bytes) -> None:
        """Parse bytes that arrived, now or in turns."""
        if self.waiting:
            self._unseen += data
        elif self._takes_long or self.body_bytes > LONG_BODY:
            self._unseen = data
            self._wait()
        else:
            self._parse(data)

    def _parse(self, data: bytes) -> None:
        at, size = 0, len(data)
        while at < size:
            self.pieces = 0
            self._feed(data[at : at + SLICE] if size > SLICE else data)
            at += SLICE
            self._takes_long = self.pieces > MANY_PIECES
            if self._takes_long and at < size:
                self._unseen = data[at:]
                self._wait()
                return

    def _wait(self) -> None:
        self.waiting = True
        self._source.pause_reading()
        self._turns.wait(self._go_on)

    def _go_on(self) -> None:
        data, self._unseen = self._unseen, b""
        self.waiting = False
        self._source.resume_reading()
        self._parse(data)
