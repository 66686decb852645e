"""Serve streams: `python -m benchmarks.proxy.stream_server PORT INTERVAL_S`.

Each chunk says when it was written (`perf_counter`, CLOCK_MONOTONIC: the same for every
process of a machine). The number of chunks is the request's `max_tokens`.
"""

import asyncio
import gc
import re
import sys
import time
from typing import Final, cast

import uvloop

from benchmarks.proxy import wire
from benchmarks.proxy.framing import CHUNKED, HEAD_END

LENGTH: Final = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
END: Final = wire.framed(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Connection(asyncio.Protocol):
    """Answer the requests of one connection one after another, each with a stream."""

    def __init__(self, loop: asyncio.AbstractEventLoop, interval_s: float) -> None:
        self._loop = loop
        self._interval_s = interval_s
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._reader = RequestReader()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the stream, as nobody reads it."""
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Answer each request that is complete."""
        request = self._reader.feed(data)
        if request is not None:
            self._answer(request)

    def _answer(self, request: bytes) -> None:
        assert self._transport is not None
        if request.startswith(b"GET "):
            said = wire.VERSION if b"/version" in request[:100] else wire.MODELS
            head = (
                f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(said)}"
            )
            self._transport.write(f"{head}\r\n\r\n{said}".encode())
            return
        asked = wire.TOKENS_ASKED.search(request)
        chunks = int(asked[1]) if asked else 1
        self._transport.write(STREAM_HEAD)
        self._write(0, chunks, self._loop.time(), bool(wire.IDS_ASKED.search(request)))

    def _write(self, number: int, chunks: int, began: float, ids: bool) -> None:
        if self._transport is None:
            return
        last = number + 1 == chunks
        piece = wire.chunk(time.perf_counter(), first=number == 0, last=last, ids=ids)
        self._transport.write(wire.framed(piece))
        if last:
            self._transport.write(END)
            return
        due = began + (number + 1) * self._interval_s
        self._timer = self._loop.call_at(due, self._write, number + 1, chunks, began, ids)


class RequestReader:
    """Gather one request after another, each in time that grows with its length."""

    def __init__(self) -> None:
        """Begin with no bytes."""
        self._received = bytearray()
        self._head: bytes | None = None

    def feed(self, data: bytes) -> bytes | None:
        """Take what came; the request once all of it is there."""
        self._received += data
        if self._head is None:
            end = self._received.find(HEAD_END)
            if end < 0:
                return None
            self._head = bytes(self._received[:end])
        if not self._is_whole(self._head):
            return None
        request, self._received, self._head = bytes(self._received), bytearray(), None
        return request

    def _is_whole(self, head: bytes) -> bool:
        if CHUNKED.search(head):
            return self._received.endswith(b"0\r\n\r\n")
        length = LENGTH.search(head)
        body_bytes = len(self._received) - len(head) - len(HEAD_END)
        return length is None or body_bytes >= int(length[1])


async def serve(port: int, interval_s: float) -> None:
    """Serve until the process is ended."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Connection(loop, interval_s), "127.0.0.1", port, backlog=4096
    )
    await server.serve_forever()


if __name__ == "__main__":
    # No cycles are made, and a collection would be counted as delay.
    gc.disable()
    uvloop.run(serve(int(sys.argv[1]), float(sys.argv[2])))
