"""Load with streams: `python -m benchmarks.proxy.streams` with a `Plan` as JSON.

A fixed number of streams is kept open: their starts are spread over one stream's length, and each
stream is followed by another until the measuring window closes. Prints a JSON line when the window
opens, one when it closes, and one with the figures once the last stream has ended.
"""

import asyncio
import gc
import json
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import uvloop

from benchmarks import wire
from benchmarks.report import percentile

IDS_SHOWN: Final = re.compile(rb'"(?:prompt_)?token_ids":\s?\[')
# The bytes between two chunks of the transfer coding; an event may contain them.
FRAMING: Final = re.compile(rb"\r\n[1-9a-f][0-9a-f]*\r\n")
GRACE_S: Final = 5.0
# Chunks that arrive together were batched if they were written at least this far apart.
BATCH_GAP_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Plan:
    """The load: `at_once` streams of `chunks` chunks; `path` and `port` are the proxy's."""

    port: int
    path: str
    at_once: int
    chunks: int
    interval_s: float
    window_s: float


class Load:
    """Keeps the streams open, and collects figures while the window is open."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._life_s = plan, plan.chunks * plan.interval_s
        self._opens = time.perf_counter() + self._life_s
        self._closes = self._opens + plan.window_s
        self._started = self._batched = 0
        self._failed: Counter[str] = Counter()
        self._firsts: list[float] = []
        self._delays: list[float] = []

    async def run(self) -> dict[str, object]:
        tasks = [asyncio.create_task(self._keep_open(n)) for n in range(self._plan.at_once)]
        for moment, name in ((self._opens, "opens"), (self._closes, "closes")):
            await asyncio.sleep(moment - time.perf_counter())
            print(json.dumps({"now": name}), flush=True)
        _, late = await asyncio.wait(tasks, timeout=self._life_s + GRACE_S)
        self._failed["not ended in time"] += len(late)
        for task in late:
            task.cancel()
        return {
            "started": self._started,
            "failed": {reason: count for reason, count in self._failed.items() if count},
            "batched": self._batched,
            "chunks": len(self._delays),
            "first_median_ms": percentile(self._firsts, 0.5),
            "first_p99_ms": percentile(self._firsts, 0.99),
            "delay_median_ms": percentile(self._delays, 0.5),
            "delay_p99_ms": percentile(self._delays, 0.99),
        }

    async def _keep_open(self, number: int) -> None:
        """Open one stream after another, on the same connection unless a stream fails."""
        await asyncio.sleep(number / self._plan.at_once * self._life_s)
        writer = None
        while time.perf_counter() < self._closes:
            self._started += 1
            try:
                if writer is None:
                    reader, writer = await asyncio.open_connection("127.0.0.1", self._plan.port)
                problem = await self._stream(reader, writer)
            except OSError as error:
                problem = f"{type(error).__name__}: {error.strerror}"
            if problem:
                self._failed[problem] += 1
            if problem and writer is not None:
                writer.close()
                writer = None
        if writer is not None:
            writer.close()

    async def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        """Request a stream and read it to its end; return what was wrong with it, or ""."""
        began = time.perf_counter()
        body = wire.as_stream(wire.prompt(f"{self._started} {began} "), self._plan.chunks)
        headers = {"Authorization": f"Bearer {wire.KEY}"}
        writer.write(wire.post("127.0.0.1", self._plan.path, body, headers))
        rest, chunks, shows_ids, is_done = b"", 0, False, False
        while data := await reader.read(2**16):
            now = time.perf_counter()
            if not rest and not chunks and not data.startswith(b"HTTP/1.1 200"):
                return f"status {data[9:12].decode()}"
            rest += data
            is_ended = rest.endswith(b"\r\n0\r\n\r\n")
            lines, _, rest = FRAMING.sub(b"", rest).rpartition(b"\n\n")
            stamps = [float(stamp) for stamp in wire.STAMP.findall(lines)]
            if stamps:
                self._note(now, None if chunks else began, stamps)
                chunks += len(stamps)
            shows_ids = shows_ids or IDS_SHOWN.search(lines) is not None
            # The body may end in a later read than its last event.
            is_done = is_done or b"data: [DONE]" in lines + rest
            if is_ended:
                if shows_ids:
                    return "ids passed on"
                is_whole = is_done and chunks == self._plan.chunks
                return "" if is_whole else "chunks missing"
        return "torn"

    def _note(self, now: float, began: float | None, stamps: list[float]) -> None:
        """Record arrived chunks; `began` is the request's time if they are the first."""
        self._batched += sum(later - earlier >= BATCH_GAP_S for earlier, later in pairwise(stamps))
        if self._opens <= now < self._closes:
            self._firsts += [] if began is None else [(now - began) * 1000]
            self._delays += [(now - stamp) * 1000 for stamp in stamps]


async def main(plan: Plan) -> None:
    print(json.dumps(await Load(plan).run()), flush=True)


if __name__ == "__main__":
    # No reference cycles are made, and a garbage collection would be measured as delay.
    gc.disable()
    uvloop.run(main(Plan(**json.loads(sys.argv[1]))))
