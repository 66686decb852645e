"""Send replies that cost much to read or to hold, and measure what others notice of each.

An upstream of this process answers with one of the attacks by the name of the model: an endless
reply in one piece, one HTTP chunk of 650 MB, events of 100 MB, long streams of text or of tool
calls, and comments. Meanwhile another client makes ten small calls a second. For each attack: how
late others are, how long their records take to be stored, the most memory of worker and ingester,
what of it the worker still holds ten seconds later, and CPU of both.

`--checkout FOLDER` runs another checkout's proxy instead, for a comparison by hand; `--only NAME`
runs one attack, `--calls N` is the number of identical calls (0: none).
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import aiohttp
import asyncpg
import psutil
from rich.console import Console

from benchmarks.report import NONE, Bar, Rows, bars_table, number, percentile
from benchmarks.stack import ROOT, Proxy, free_port, running, running_proxy

MB: Final = 2**20
EVENTS, JSON = "text/event-stream", "application/json"
REPLY: Final = json.dumps(
    {"id": "r", "choices": [{"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}]}
).encode()
END: Final = (
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
)
WORKER_MB, INGESTER_MB, STORED_S, PINGS_MS = 300, 300, 2.0, 20
LATER_S, REST_S = 10.0, 120.0


def event(delta: object) -> bytes:
    chunk = {"id": "r", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def texts(size: int) -> Iterator[bytes]:
    """Yield a stream of ordinary chunks of text, `size` bytes in all."""
    block = event({"content": "a few words of text "}) * 400
    for _ in range(size // len(block)):
        yield block
    yield END


def tool_calls(count: int) -> Iterator[bytes]:
    for at in range(0, count, 200):
        calls = range(at, at + 200)
        named = {"name": "f", "arguments": "{}"}
        made = ({"tool_calls": [{"index": n, "id": f"c{n}", "function": named}]} for n in calls)
        yield b"".join(map(event, made))
    yield END


def pings(size: int) -> Iterator[bytes]:
    for _ in range(size // 70_000):
        yield b": ping\n" * 10_000
    yield END


def blank(size: int, begin: bytes, end: bytes = b"") -> Iterator[bytes]:
    """Yield one text of `size` bytes between `begin` and `end`."""
    yield begin
    for _ in range(size // 2**17):
        yield b"x" * 2**17
    yield end


LONG: Final = b'data: {"choices":[{"index":0,"delta":{"content":"'


@dataclass(frozen=True)
class Attack:
    """One attack: its bytes, how often at once, and how long it may take (None: to its end)."""

    pieces: Callable[[], Iterator[bytes]]
    kind: str = EVENTS
    at_once: int = 1
    within_s: float | None = None
    one_chunk: int = 0
    mb: float = 0


ATTACKS: Final = {
    "comments, 47 MB": Attack(lambda: pings(47 * MB), mb=47),
    "endless JSON": Attack(lambda: blank(10**12, b'{"x":"'), JSON, 1, 12),
    "endless JSON x 4": Attack(lambda: blank(10**12, b'{"x":"'), JSON, 4, 12),
    "endless JSON x 8": Attack(lambda: blank(10**12, b'{"x":"'), JSON, 8, 12),
    "one chunk of 650 MB": Attack(lambda: blank(650 * MB, b""), EVENTS, 1, 60, 650 * MB),
    "event of 100 MB x 4": Attack(lambda: blank(100 * MB, LONG, b'"}}]}\n\n' + END), at_once=4),
    "text, 20 MB": Attack(lambda: texts(20 * MB), mb=20),
    "text, 40 MB": Attack(lambda: texts(40 * MB), mb=40),
    "text, 150 MB": Attack(lambda: texts(150 * MB), mb=150),
    "40,000 tool calls": Attack(lambda: tool_calls(40_000), mb=6),
}


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one connection's requests: each attack by its model's name, all else with `REPLY`."""
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            size = int((head.lower().partition(b"content-length: ")[2] or b"0").split(b"\r")[0])
            body = await reader.readexactly(size) if size else b"{}"
            attack = ATTACKS.get(json.loads(body).get("model", ""))
            if attack is None:
                answer = b'{"data": []}' if head.startswith(b"GET") else REPLY
                lead = f"HTTP/1.1 200 OK\r\nContent-Type: {JSON}\r\nContent-Length: {len(answer)}"
                writer.write(lead.encode() + b"\r\n\r\n" + answer)
                continue
            lead = f"HTTP/1.1 200 OK\r\nContent-Type: {attack.kind}\r\n"
            writer.write(lead.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
            if attack.one_chunk:
                writer.write(b"%x\r\n" % attack.one_chunk)
            for piece in attack.pieces():
                framed = piece if attack.one_chunk else b"%x\r\n%b\r\n" % (len(piece), piece)
                writer.write(framed if piece else b"")
                await writer.drain()
            writer.write(b"\r\n0\r\n\r\n" if attack.one_chunk else b"0\r\n\r\n")
    except (OSError, asyncio.IncompleteReadError):
        writer.close()


async def upstream(port: int) -> None:
    server = await asyncio.start_server(serve, "127.0.0.1", port)
    await server.serve_forever()


@dataclass
class Seen:
    """What was seen while something ran; times in seconds, memory in bytes."""

    late: list[float] = field(default_factory=list)
    stored: list[float] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)
    later: int = 0
    own_s: float | None = None


class Watch:
    """Call the proxy as others do, and watch its processes."""

    def __init__(self, proxy: Proxy, session: aiohttp.ClientSession, pool: asyncpg.Pool) -> None:
        self._url = f"http://127.0.0.1:{proxy.port}/v1/chat/completions"
        self._session, self._pool = session, pool
        tree = psutil.Process(proxy.process.pid).children(recursive=True)
        listens = {
            c.laddr.port: p for p in tree for c in p.net_connections() if c.status == "LISTEN"
        }
        self._processes = {"worker": listens[proxy.port], "ingester": listens[proxy.admin]}

    async def call(self, model: str) -> str:
        body = {"model": model, "messages": [], "stream": model in ATTACKS}
        async with self._session.post(self._url, json=body) as response:
            async for _ in response.content.iter_any():
                pass
            return response.headers["x-pawl-call"]

    async def is_stored(self, call: str, within_s: float) -> float | None:
        began = time.perf_counter()
        while (took := time.perf_counter() - began) < within_s:
            if await self._pool.fetchval("SELECT 1 FROM transitions WHERE id = $1", call):
                return took
            await asyncio.sleep(0.05)
        return None

    async def during(self, attack: Attack | None, name: str, seconds: float) -> Seen:
        """Make others' calls while an attack runs and is stored, or for `seconds`."""
        seen, stop, storing = Seen(), asyncio.Event(), set[asyncio.Task[None]]()
        cpu = {who: sum(p.cpu_times()[:2]) for who, p in self._processes.items()}

        async def store(call: str) -> None:
            seen.stored.append(await self.is_stored(call, REST_S) or REST_S)

        async def others() -> None:
            while not stop.is_set():
                began = time.perf_counter()
                storing.add(asyncio.create_task(store(await self.call("m"))))
                seen.late.append(time.perf_counter() - began)
                await asyncio.sleep(0.1)

        async def memory() -> None:
            while not stop.is_set():
                for who, process in self._processes.items():
                    seen.memory[who] = max(seen.memory.get(who, 0), process.memory_info().rss)
                await asyncio.sleep(0.02)

        beside = [asyncio.create_task(others()), asyncio.create_task(memory())]
        if attack is None:
            await asyncio.sleep(seconds)
        else:
            attackers = [asyncio.create_task(self.call(name)) for _ in range(attack.at_once)]
            done, late = await asyncio.wait(attackers, timeout=attack.within_s)
            for task in late:
                task.cancel()
            if attack.mb and done:
                seen.own_s = await self.is_stored(await done.pop(), REST_S)
        stop.set()
        await asyncio.wait([*beside, *storing])
        seen.cpu = {w: sum(p.cpu_times()[:2]) - cpu[w] for w, p in self._processes.items()}
        if attack is not None:
            await asyncio.sleep(LATER_S)
            seen.later = self._processes["worker"].memory_info().rss
        return seen


async def identical(watch: Watch, calls: int) -> list[float]:
    """Make that many equal calls, and return the stored calls a second of each tenth of them."""
    rates = []
    for _ in range(10):
        began, last = time.perf_counter(), ""
        for _ in range(0, calls // 10, 50):
            last = (await asyncio.gather(*(watch.call("m") for _ in range(50))))[-1]
        await watch.is_stored(last, REST_S)
        rates.append(calls / 10 / (time.perf_counter() - began))
    return rates


async def measured(proxy: Proxy, only: str, calls: int) -> AsyncIterator[Rows]:
    lines, bars = [], []
    async with aiohttp.ClientSession() as session, asyncpg.create_pool(proxy.database_url) as pool:
        watch = Watch(proxy, session, pool)
        await watch.during(None, "", 3)
        quiet = await watch.during(None, "", 10)
        p99 = percentile(quiet.late, 0.99)
        for name, attack in ATTACKS.items():
            if only not in name:
                continue
            before = watch._processes["worker"].memory_info().rss / MB
            seen = await watch.during(attack, name, 0)
            worker, ingester = (seen.memory[who] / MB for who in ("worker", "ingester"))
            late, stored = percentile(seen.late, 0.99), max(seen.stored, default=0.0)
            cpu = [1000 * seen.cpu[who] / attack.mb if attack.mb else None for who in seen.cpu]
            figures = [(seen.own_s, 1), (late * 1000, 0), (stored, 1), (worker, 0), (before, 0)]
            figures += [(seen.later / MB, 0), (ingester, 0), *((one, 0) for one in cpu)]
            lines.append([name, *(number(value, digits) for value, digits in figures)])
            bars.append(Bar(f"{name}: worker, MB", worker, WORKER_MB))
            bars.append(Bar(f"{name}: worker 10 s later, MB more", seen.later / MB - before, 40))
            bars.append(Bar(f"{name}: others stored after, s", stored, STORED_S))
            if name.startswith("comments"):
                bars.append(Bar("comments: CPU, ms/MB", sum(one or 0.0 for one in cpu), PINGS_MS))
                bars.append(Bar("comments: ingester, MB", ingester, INGESTER_MB))
                bars.append(Bar("comments: p99 of others, times", late / p99, 2))
            if name == "text, 150 MB":
                bars.append(Bar(f"{name}: stored after, s", seen.own_s, 10))
        if calls:
            rates = await identical(watch, calls)
            lines.append([f"{calls:,} equal calls, stored/s", number(rates[0]), number(rates[-1])])
            lines[-1] += [NONE] * 7
            bars.append(Bar("equal calls: last tenth to first", rates[-1] / rates[0], 0.8, True))
    heads = ["", "own stored s", "others p99 ms", "others stored s", "worker MB", "before"]
    heads += ["10 s later", "ingester MB", "worker ms/MB", "ingester ms/MB"]
    note = f"others' p99 without attack: {p99 * 1000:.0f} ms"
    yield Rows("Hostile replies", heads, lines, [note])
    yield bars_table(bars)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkout", type=Path, default=ROOT)
    parser.add_argument("--only", default="")
    parser.add_argument("--calls", type=int, default=0)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        await upstream(options.serve)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        port = free_port()
        command = [sys.executable, "-m", "benchmarks.hostile", "--serve", str(port)]
        stack.enter_context(running(command, folder / "upstream.log"))
        proxy = stack.enter_context(running_proxy(folder, port, options.checkout.resolve()))
        async for rows in measured(proxy, options.only, options.calls):
            Console(width=160, file=sys.stdout).print(rows.rich())


if __name__ == "__main__":
    asyncio.run(main())
