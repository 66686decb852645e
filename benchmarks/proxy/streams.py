"""Load with streams: `python -m benchmarks.proxy.streams` with a `Plan` as JSON.

So many streams are kept open: they begin spread over one stream's length, and each is followed by
another, until the window closes. Prints a JSON line when the window opens, one when it closes, and
one with the figures once the last stream has ended.
"""

import asyncio
import gc
import json
import re
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, cast

import uvloop

from benchmarks import wire
from benchmarks.report import percentile

DONE: Final = b"data: [DONE]"
IDS_SHOWN: Final = re.compile(rb'"(?:prompt_)?token_ids":\s?\[')
GRACE_S: Final = 5.0
# Chunks that are delivered together were batched if they were written so far apart.
BATCH_GAP_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan the load; `path` and `port` are the proxy's."""

    port: int
    path: str
    at_once: int
    chunks: int
    interval_s: float
    window_s: float

    @property
    def life_s(self) -> float:
        """Return how long a stream lasts."""
        return self.chunks * self.interval_s


class Load:
    """Keep the streams open, and gather what is seen while the window is open."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.loop = asyncio.get_running_loop()
        self.opens = time.perf_counter() + plan.life_s
        self.closes = self.opens + plan.window_s
        self.open: set[Stream] = set()
        self.started = self.batched = 0
        self.failed: Counter[str] = Counter()
        self._firsts: list[float] = []
        self._delays: list[float] = []
        self._idle = asyncio.Event()
        self._connecting: set[asyncio.Task[None]] = set()

    async def run(self) -> dict[str, object]:
        plan = self.plan
        for number in range(plan.at_once):
            self.loop.call_later(number / plan.at_once * plan.life_s, self._start)
        for moment, name in ((self.opens, "opens"), (self.closes, "closes")):
            await asyncio.sleep(moment - time.perf_counter())
            print(json.dumps({"now": name}), flush=True)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), plan.life_s + GRACE_S)
        self.failed["not ended in time"] += len(self.open)
        return {
            "started": self.started,
            "failed": {reason: count for reason, count in self.failed.items() if count},
            "batched": self.batched,
            "chunks": len(self._delays),
            "first_median_ms": percentile(self._firsts, 0.5),
            "first_p99_ms": percentile(self._firsts, 0.99),
            "delay_median_ms": percentile(self._delays, 0.5),
            "delay_p99_ms": percentile(self._delays, 0.99),
        }

    def note(self, now: float, began: float | None, stamps: list[float]) -> None:
        """Note a piece that came; `began` is when its request was sent, if it is the first."""
        self.batched += sum(later - earlier >= BATCH_GAP_S for earlier, later in pairwise(stamps))
        if self.opens <= now < self.closes:
            self._firsts += [] if began is None else [(now - began) * 1000]
            self._delays += [(now - stamp) * 1000 for stamp in stamps]

    def is_closed(self) -> bool:
        return time.perf_counter() >= self.closes

    def ended(self, stream: "Stream", failure: str | None) -> None:
        """Let another stream take the place of one that ended, while the window is not closed."""
        self.open.discard(stream)
        if failure is not None:
            self.failed[failure] += 1
        transport = stream.transport
        is_kept = transport is not None and not transport.is_closing() and failure is None
        if is_kept and not self.is_closed():
            stream.begin()
            return
        if transport is not None:
            transport.close()
        if not self.is_closed():
            self._start()
        elif not self.open:
            self._idle.set()

    def _start(self) -> None:
        task = self.loop.create_task(self._connect())
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self) -> None:
        try:
            await self.loop.create_connection(lambda: Stream(self), "127.0.0.1", self.plan.port)
        except OSError as error:
            self.started += 1
            self.failed[f"not connected: {error.strerror}"] += 1


class Stream(asyncio.Protocol):
    """Keep one connection, and the stream on it."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._is_over = True
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if self._load.is_closed():
            self.transport.close()
        else:
            self.begin()

    def begin(self) -> None:
        assert self.transport is not None
        self._began = time.perf_counter()
        self._rest, self._reply = b"", ChunkedReply()
        self._chunks = 0
        self._is_done = self._is_over = self._shows_ids = False
        load = self._load
        load.started += 1
        load.open.add(self)
        body = wire.streamed(wire.prompt(f"{load.started} {self._began} "), load.plan.chunks)
        headers = {"Authorization": f"Bearer {wire.KEY}"}
        self.transport.write(wire.post("127.0.0.1", load.plan.path, body, headers))

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._is_over:
            return
        content = self._reply.feed(data)
        if self._reply.status not in {0, 200}:
            assert self.transport is not None
            self.transport.abort()
            self._finish(f"status {self._reply.status}")
            return
        lines, _, self._rest = (self._rest + content).rpartition(b"\n")
        self._shows_ids = self._shows_ids or IDS_SHOWN.search(lines) is not None
        stamps = [float(stamp) for stamp in wire.STAMP.findall(lines)]
        if stamps:
            self._load.note(now, None if self._chunks else self._began, stamps)
            self._chunks += len(stamps)
        self._is_done = self._is_done or DONE in lines
        if self._reply.ended:
            self._finish(None if self._is_done else "without an end")

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if not self._is_over:
            self._finish(None if self._is_done else "torn")

    def _finish(self, problem: str | None) -> None:
        self._is_over = True
        if problem is None and self._chunks != self._load.plan.chunks:
            problem = "chunks missing"
        self._load.ended(self, "ids passed on" if self._shows_ids else problem)


class ChunkedReply:
    """Take an HTTP/1.1 reply in chunked transfer coding apart (RFC 9112 §7.1)."""

    def __init__(self) -> None:
        self.status = 0
        self.ended = False
        self._rest = b""
        self._left = 0

    def feed(self, data: bytes) -> bytes:
        """Return the content in this piece.

        Raises:
            ValueError: this is no reply in chunked coding.
        """
        self._rest += data
        if not self.status and not self._take_head():
            return b""
        content = []
        while self._rest and not self.ended and (self._left or self._take_size()):
            content.append(self._rest[: self._left])
            self._rest = self._rest[self._left :]
            self._left -= len(content[-1])
        return b"".join(content)

    def _take_head(self) -> bool:
        head, is_complete, rest = self._rest.partition(wire.HEAD_END)
        if is_complete:
            self.status = int(head[9:12])
            if self.status == 200 and not wire.CHUNKED.search(head):
                raise ValueError("a stream that is not in chunked coding")
            self._rest = rest
        return bool(is_complete)

    def _take_size(self) -> bool:
        """Take a size line, and the line end of the chunk before it; False if it is not there."""
        line, is_complete, rest = self._rest.removeprefix(b"\r\n").partition(b"\r\n")
        if not is_complete:
            return False
        size = int(line.partition(b";")[0], 16)
        if not size:
            # The trailer's empty line belongs to the reply.
            self.ended = rest.startswith(b"\r\n")
            return False
        self._rest, self._left = rest, size
        return True


async def main(plan: Plan) -> None:
    print(json.dumps(await Load(plan).run()), flush=True)


if __name__ == "__main__":
    # No cycles are made, and a collection would be counted as delay.
    gc.disable()
    uvloop.run(main(Plan(**json.loads(sys.argv[1]))))
