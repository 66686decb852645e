"""A body on its way: pieces that arrived, and brakes for whoever sends too fast."""

import asyncio
from collections.abc import Callable
from typing import Final, Protocol, cast

# A sender is told to wait when so much lies unread, and to go on when it is taken.
HIGH_WATER: Final = 256 * 1024
# Pieces smaller than this are joined while they wait: an object each would cost many times more.
SMALL: Final = 1024
Grown = Callable[[int], None]


class Brake(Protocol):
    """What can be told to send no more for now: a transport."""

    def pause_reading(self) -> None:
        """Stop."""

    def resume_reading(self) -> None:
        """Go on."""


class Inflow:
    """Pieces of one body, from the parser to whoever reads them."""

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
        """Whether somebody waits for more."""
        return self._waiter is not None

    @property
    def exhausted(self) -> bool:
        """Whether all of it has arrived, and was taken."""
        return self.ended and not self._pieces

    @property
    def braked(self) -> bool:
        """Whether the sender was told to wait."""
        return self._braked

    def put(self, data: bytes) -> None:
        """More has arrived."""
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
        """Add it to what came before; the first piece of all stays as it came, and is `bytes`."""
        last = self._pieces[-1]
        if isinstance(last, bytearray):
            last += data
        else:
            self._pieces.append(bytearray(data))

    def end(self) -> None:
        """That was all."""
        self.ended = True
        self._wake()

    def fail(self, error: BaseException) -> None:
        """No more will come, and it was not all; who reads is told with `error`."""
        if not self.ended and self._failure is None:
            self._failure = error
            self._wake()

    def take(self) -> bytes:
        """All that lies here; empty if nothing does."""
        pieces = self._pieces
        # Most often there is one piece, and the first is always as it came.
        data = cast("bytes", pieces[0]) if len(pieces) == 1 else b"".join(pieces)
        self._pieces = []
        self._size = 0
        if self._braked:
            self._braked = False
            self._source.resume_reading()
        return data

    def raise_failure(self) -> None:
        """Raise what it broke off with, if it did."""
        if self._failure is not None:
            raise self._failure

    async def more(self) -> bytes:
        """The next pieces; empty at the end.

        Raises:
            ConnectionError: it broke off before its end.
        """
        while not self._pieces and not self.ended:
            await self._wait()
        return self.take()

    async def whole(self, limit: int | None = None, grown: Grown | None = None) -> bytes | None:
        """All of it; None once it is longer than `limit`.

        `grown` is told how much there is, whenever there is more.

        Raises:
            ConnectionError: it broke off before its end.
        """
        # Whoever wants all of it at once must not be kept waiting by the brake.
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
