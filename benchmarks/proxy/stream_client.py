"""Load with streams: `python -m benchmarks.proxy.stream_client` with a `Plan` as JSON.

So many streams are kept open: they begin spread over one stream's length, and each is
followed by another, until the window closes. Prints a JSON line when the window opens, one
when it closes, and one with what was seen once the last stream has ended.
"""

import asyncio
import gc
import json
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Final, cast

import uvloop

from benchmarks.proxy import wire
from benchmarks.proxy.figures import batched, percentile
from benchmarks.proxy.framing import ChunkedReply

DONE: Final = b"data: [DONE]"
GRACE_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan what to do. `path` and `port` are the proxy's."""

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
    """Share between all streams the plan, the clock's window, and what was seen."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.loop = asyncio.get_running_loop()
        self.opens = time.perf_counter() + plan.life_s
        self.closes = self.opens + plan.window_s
        self.started = 0
        self.open: set[Stream] = set()
        self._idle = asyncio.Event()
        self._connecting: set[asyncio.Task[None]] = set()
        self.failed: Counter[str] = Counter()
        self.batched = 0
        self.firsts: list[float] = []
        self.delays: list[float] = []

    def note(self, now: float, began: float | None, stamps: list[float]) -> None:
        """Note that a piece came; `began` is when its request was sent, if it is the first."""
        self.batched += batched(stamps)
        if not self.opens <= now < self.closes:
            return
        if began is not None:
            self.firsts.append((now - began) * 1000)
        self.delays += [(now - stamp) * 1000 for stamp in stamps]

    def is_closed(self) -> bool:
        """Return whether no stream is to begin any more."""
        return time.perf_counter() >= self.closes

    def ended(self, stream: "Stream", failure: str | None) -> None:
        """End one stream; another takes its place while the window is not closed."""
        self.open.discard(stream)
        if failure is not None:
            self.failed[failure] += 1
        if failure is None and not self.is_closed() and stream.is_connected():
            stream.begin()
            return
        if stream.transport is not None:
            stream.transport.close()
        if not self.is_closed():
            self._start()
        elif not self.open:
            self._idle.set()

    async def _connect(self) -> None:
        """Start a stream on a connection of its own."""
        try:
            await self.loop.create_connection(lambda: Stream(self), "127.0.0.1", self.plan.port)
        except OSError as error:
            self.started += 1
            self.failed[f"not connected: {error.strerror}"] += 1

    async def run(self) -> None:
        """Begin them, wait, report."""
        plan = self.plan
        for number in range(plan.at_once):
            self.loop.call_later(number / plan.at_once * plan.life_s, self._start)
        await self._report_at(self.opens, "opens")
        await self._report_at(self.closes, "closes")
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), plan.life_s + GRACE_S)
        self.failed["not ended in time"] += len(self.open)
        print(json.dumps(self._seen()), flush=True)

    def _start(self) -> None:
        task = self.loop.create_task(self._connect())
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _report_at(self, moment: float, name: str) -> None:
        await asyncio.sleep(moment - time.perf_counter())
        print(json.dumps({"now": name}), flush=True)

    def _seen(self) -> dict[str, object]:
        return {
            "started": self.started,
            "failed": {reason: count for reason, count in self.failed.items() if count},
            "batched": self.batched,
            "chunks": len(self.delays),
            "first_median_ms": percentile(self.firsts, 0.5),
            "first_p99_ms": percentile(self.firsts, 0.99),
            "delay_median_ms": percentile(self.delays, 0.5),
            "delay_p99_ms": percentile(self.delays, 0.99),
        }


class Stream(asyncio.Protocol):
    """Keep one connection, and the stream on it."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self.transport: asyncio.Transport | None = None
        self._reset()
        self._over = True

    def _reset(self) -> None:
        self._began = time.perf_counter()
        self._rest = b""
        self._reply = ChunkedReply()
        self._chunks = 0
        self._done = False
        self._over = False
        self._problem: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the stream, once connected."""
        self.transport = cast(asyncio.Transport, transport)
        if self._load.is_closed():
            self.transport.close()
        else:
            self.begin()

    def is_connected(self) -> bool:
        """Return whether another stream can follow on the same connection."""
        return self.transport is not None and not self.transport.is_closing()

    def begin(self) -> None:
        """Send the request."""
        assert self.transport is not None
        self._reset()
        load = self._load
        load.started += 1
        load.open.add(self)
        body = wire.stream_prompt(f"{load.started} {self._began} ", load.plan.chunks)
        self.transport.write(wire.post("127.0.0.1", load.plan.path, body))

    def data_received(self, data: bytes) -> None:
        """Read the chunks that came."""
        now = time.perf_counter()
        if self._over:
            return
        content = self._reply.feed(data)
        if self._reply.status not in {0, 200}:
            self._refused(self._reply.status)
            return
        lines, _, self._rest = (self._rest + content).rpartition(b"\n")
        if wire.IDS_SHOWN.search(lines):
            self._problem = "ids passed on"
        stamps = [float(stamp) for stamp in wire.STAMP.findall(lines)]
        if stamps:
            self._load.note(now, self._began if self._chunks == 0 else None, stamps)
            self._chunks += len(stamps)
        self._done = self._done or DONE in lines
        if self._reply.ended:
            self._finish(None if self._done else "without an end")

    def _refused(self, status: int) -> None:
        assert self.transport is not None
        self.transport.abort()
        self._finish(f"status {status}")

    def connection_lost(self, exc: Exception | None) -> None:
        """End the stream as failed, if it was not at its end."""
        self.transport = None
        if not self._over:
            self._finish(None if self._done else "torn")

    def _finish(self, problem: str | None) -> None:
        self._over = True
        if problem is None and self._chunks != self._load.plan.chunks:
            problem = "chunks missing"
        self._load.ended(self, self._problem or problem)


async def main(plan: Plan) -> None:
    """Run one load."""
    await Load(plan).run()


def as_argument(plan: Plan) -> str:
    """Return the plan as this module reads it from the command line."""
    return json.dumps(asdict(plan))


if __name__ == "__main__":
    # No cycles are made, and a collection would be counted as delay.
    gc.disable()
    uvloop.run(main(Plan(**json.loads(sys.argv[1]))))
