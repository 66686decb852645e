"""Connect both ends without a network: a transport that remembers, and messages."""

import asyncio
from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st

from proxy.http.client import Pool, UpstreamConnection
from proxy.http.exchange import BodyTooSlow, Exchange
from proxy.http.server import ClientDeadlines, Connection, Handler, Server


class Wire(asyncio.Transport):
    """Remember what was written to it, and whether it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.closed = False
        self.aborted = False
        self.ended = False
        self.paused = False
        # What the other side has not taken; a client that stops reading leaves it all here.
        self.stalled = False
        self.unsent = 0
        self.protocol: asyncio.Protocol | None = None

    def write(self, data: Any) -> None:
        assert not self.ended
        if not self.is_closing():
            self.sent += bytes(data)
            self.unsent += len(data) if self.stalled else 0

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def is_closing(self) -> bool:
        return self.closed or self.aborted

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def close(self) -> None:
        self._lose("closed")

    def abort(self) -> None:
        self._lose("aborted")

    def _lose(self, how: str) -> None:
        if not self.is_closing():
            asyncio.get_running_loop().call_soon(self._lost)
        setattr(self, how, True)

    def _lost(self) -> None:
        assert self.protocol is not None
        self.protocol.connection_lost(None)


def client(handle: Handler, **server: Any) -> tuple[Connection, Wire]:
    """Connect a client to a server that does `handle`; `server`: what else it is given."""
    given = {"patience": ClientDeadlines(), "explain": lambda *_: b"", "on_late": lambda *_: None}
    connection, wire = Connection(Server(handle, **given | server)), Wire()
    wire.protocol = connection
    connection.connection_made(wire)
    return connection, wire


def upstream() -> tuple[Pool, UpstreamConnection, Wire]:
    """Make a connection of a pool's."""
    pool = Pool("model", 80, tls=None)
    connection, wire = UpstreamConnection(pool), Wire()
    wire.protocol = connection
    connection.connection_made(wire)
    return pool, connection, wire


async def swept(connection: Connection, *after_s: float, **patience: float) -> None:
    """Look at a connection now, and again so many seconds later each time."""
    now = asyncio.get_running_loop().time()
    for seconds in (0.0, *after_s):
        now += seconds
        connection.sweep(now, ClientDeadlines(**patience))
        await settle()


async def refusing(exchange: Exchange) -> None:
    """Tell a slow client why it has no answer, and others their body."""
    try:
        body = await exchange.read(2**20) or b""
    except BodyTooSlow:
        exchange.reply(408, b"", [], b"")
    else:
        exchange.reply(200, b"OK", [], body)


async def settle() -> None:
    """Let every task go as far as it can."""
    for _ in range(10):
        await asyncio.sleep(0)


async def feed(connection: asyncio.Protocol, pieces: Iterable[bytes]) -> None:
    """Let data arrive piece by piece, and be worked on in between."""
    for piece in pieces:
        connection.data_received(piece)
        await asyncio.sleep(0)
    await settle()


def cuts(data: bytes) -> st.SearchStrategy[list[bytes]]:
    """Yield every way of cutting it into pieces."""
    offsets = st.lists(st.integers(0, len(data)), max_size=12).map(sorted)
    return offsets.map(
        lambda at: [data[a:b] for a, b in zip([0, *at], [*at, len(data)], strict=True)]
    )


class Seen:
    """Note each exchange, and answer with its body."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, list[tuple[bytes, bytes]], bytes]] = []

    async def __call__(self, exchange: Exchange) -> None:
        body = await exchange.read(2**20) or b""
        self.requests.append((exchange.method, exchange.target, exchange.headers, body))
        exchange.reply(200, b"OK", [(b"X-Echo", b"1")], body)
