"""Measure how fast requests are parsed and answered on connections that need no network.

`python -m benchmarks.http_requests`: calls of a usual size, a stream's chunks, and a body of many
small chunks, each as items a second of processor time (the best of several rounds).
"""

import asyncio
from collections.abc import Awaitable, Callable
from time import process_time
from typing import Any, Final

from proxy.http.connection import Connection
from proxy.http.exchange import Exchange
from proxy.http.server import Server

ROUNDS: Final = 25
REQUESTS: Final = 4000
CHUNKS: Final = 20_000
BODY: Final = b'{"model":"m","messages":[{"role":"user","content":"%b"}]}' % (b"q" * 400)
LINES: Final = b"".join(b"X-Header-%d: some value of a usual length\r\n" % n for n in range(12))
CALL: Final = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:8100\r\n%bContent-Length: %d\r\n\r\n%b"
    % (LINES, len(BODY), BODY)
)
EVENT: Final = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"word"}}]}\n\n'
CHUNKED: Final = b"POST /v1/x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
SMALL: Final = CHUNKED + b"2\r\nab\r\n" * CHUNKS + b"0\r\n\r\n"


class Nowhere(asyncio.Transport):
    """Take what is written."""

    def write(self, data: Any) -> None:
        """Throw it away."""

    def get_write_buffer_size(self) -> int:
        """Return 0: nothing waits."""
        return 0

    def is_closing(self) -> bool:
        """Return False: it never closes."""
        return False

    def pause_reading(self) -> None:
        """Do nothing: nothing comes by itself."""

    def resume_reading(self) -> None:
        """Do nothing: nothing comes by itself."""


async def _answer(exchange: Exchange) -> None:
    body = await exchange.read(2**24)
    exchange.reply(200, b"OK", [], body or b"")


async def _stream(exchange: Exchange) -> None:
    await exchange.read(2**20)
    exchange.begin(200, b"OK", [])
    for _ in range(CHUNKS):
        exchange.write(EVENT)
        await exchange.drained()
    exchange.end()


async def _one(handle: Callable[[Exchange], Awaitable[None]], pieces: list[bytes]) -> float:
    connection = Connection(Server(handle))
    connection.connection_made(Nowhere())
    began = process_time()
    for piece in pieces:
        connection.data_received(piece)
        while connection.busy:  # noqa: ASYNC110 -- its task is what is measured
            await asyncio.sleep(0)
    return process_time() - began


def main() -> None:
    """Measure, and say it."""
    measured = {
        "calls": (_answer, [CALL] * REQUESTS, REQUESTS),
        "chunks of a stream": (_stream, [CALL], CHUNKS),
        "chunks of 2 bytes": (_answer, [SMALL], CHUNKS),
    }
    for name, (handle, pieces, count) in measured.items():
        best = min(asyncio.run(_one(handle, pieces)) for _ in range(ROUNDS))
        print(f"{name:20} {count / best:12,.0f} a second", flush=True)


if __name__ == "__main__":
    main()
