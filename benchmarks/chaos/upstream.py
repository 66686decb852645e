"""Serve a model that answers at once: `python -m benchmarks.chaos.upstream PORT`.

Whole replies of 20 tokens; streams of five chunks, five milliseconds apart. A request that asks
for poison (`benchmarks.chaos.poison`) gets that, whole or as a stream's one event.
"""

import asyncio
import gc
import sys
import time
from typing import Final, cast

import uvloop

from benchmarks.chaos.poison import reply_to
from benchmarks.proxy import wire
from benchmarks.proxy.stream_server import END, STREAM_HEAD, RequestReader

CHUNKS: Final = 5
INTERVAL_S: Final = 0.005
WHOLE: Final = wire.reply(20).encode()


class Connection(asyncio.Protocol):
    """Answer the requests of one connection, one after another."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._reader = RequestReader()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the transport."""
        self._transport = None

    def data_received(self, data: bytes) -> None:
        """Answer each request that is complete."""
        request = self._reader.feed(data)
        if request is not None and self._transport is not None:
            self._answer(self._transport, request)

    def _answer(self, transport: asyncio.Transport, request: bytes) -> None:
        poison = reply_to(request)
        if b'"stream":true' in request:
            transport.write(STREAM_HEAD)
            if poison is None:
                self._stream(0)
            else:
                transport.write(wire.framed(b"data: %b\n\n" % poison) + END)
        elif request.startswith(b"GET "):
            transport.write(whole(wire.MODELS.encode()))
        else:
            transport.write(whole(WHOLE if poison is None else poison))

    def _stream(self, number: int) -> None:
        if self._transport is None:
            return
        last = number + 1 == CHUNKS
        piece = wire.chunk(time.perf_counter(), first=number == 0, last=last, ids=True)
        self._transport.write(wire.framed(piece) + (END if last else b""))
        if not last:
            asyncio.get_running_loop().call_later(INTERVAL_S, self._stream, number + 1)


def whole(said: bytes) -> bytes:
    """Return a whole reply."""
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(said)}"
    return head.encode() + b"\r\n\r\n" + said


async def serve(port: int) -> None:
    """Serve until the process is ended."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Connection, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    gc.disable()
    uvloop.run(serve(int(sys.argv[1])))
