"""Serve a model with canned replies: `python -m benchmarks.upstream PORT INTERVAL_S`.

A whole reply has 20 tokens; a stream has as many chunks as the request's `max_tokens`, each of
which contains the time when it was written (`perf_counter`, CLOCK_MONOTONIC: the same for every
process of a machine). A request for a poisoned reply gets it, whole or as a stream's only event.
"""

import asyncio
import gc
import re
import sys
import time
from typing import Final, cast

import uvloop

from benchmarks import wire

LENGTH: Final = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
TOKENS_ASKED: Final = re.compile(rb'"max_tokens":\s?(\d+)')
STREAM_ASKED: Final = re.compile(rb'"stream":\s?true')
IDS_ASKED: Final = re.compile(rb'"return_token_ids":\s?true')
WHOLE_REPLY: Final = wire.reply(20).encode()


class Connection(asyncio.Protocol):
    """Answers the requests of one connection, one after another."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._head: bytes | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._head is None:
            end = self._received.find(wire.HEAD_END)
            if end < 0:
                return
            self._head = bytes(self._received[:end])
        if self._is_complete(self._head) and self._transport is not None:
            request, self._received, self._head = bytes(self._received), bytearray(), None
            self._answer(self._transport, request)

    def _is_complete(self, head: bytes) -> bool:
        if wire.CHUNKED.search(head):
            return self._received.endswith(b"0\r\n\r\n")
        length = LENGTH.search(head)
        body_bytes = len(self._received) - len(head) - len(wire.HEAD_END)
        return length is None or body_bytes >= int(length[1])

    def _answer(self, transport: asyncio.Transport, request: bytes) -> None:
        poison = wire.poisoned_reply(request)
        if request.startswith(b"GET "):
            body = wire.VERSION if b"/version" in request[:100] else wire.MODELS
            transport.write(wire.http_reply(body.encode()))
        elif not STREAM_ASKED.search(request):
            transport.write(wire.http_reply(WHOLE_REPLY if poison is None else poison))
        elif poison is not None:
            event = wire.as_http_chunk(b"data: %b\n\n" % poison)
            transport.write(wire.STREAM_HEAD + event + wire.STREAM_END)
        else:
            asked = TOKENS_ASKED.search(request)
            ids = bool(IDS_ASKED.search(request))
            transport.write(wire.STREAM_HEAD)
            self._stream(0, int(asked[1]) if asked else 1, asyncio.get_running_loop().time(), ids)

    def _stream(self, number: int, chunks: int, began: float, ids: bool) -> None:
        if self._transport is None:
            return
        is_last = number + 1 == chunks
        piece = wire.chunk(time.perf_counter(), first=number == 0, last=is_last, ids=ids)
        self._transport.write(wire.as_http_chunk(piece) + (wire.STREAM_END if is_last else b""))
        if not is_last:
            due = began + (number + 1) * self._interval_s
            loop = asyncio.get_running_loop()
            loop.call_at(due, self._stream, number + 1, chunks, began, ids)


async def serve(port: int, interval_s: float) -> None:
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(interval_s), "127.0.0.1", port, backlog=4096
    )
    await server.serve_forever()


if __name__ == "__main__":
    # No reference cycles are made, and a garbage collection would be measured as delay.
    gc.disable()
    uvloop.run(serve(int(sys.argv[1]), float(sys.argv[2])))
