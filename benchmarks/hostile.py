"""Send replies that cost much time or memory, and measure how they affect other clients.

An upstream sends the attack that the model's name selects: an endless reply in one piece, one HTTP
chunk of 650 MB, events of 100 MB, long streams of text or of tool calls, and comments. The attack
is repeated while another client makes 2,000 small calls, one after the other. Each connection of
the upstream is a process; attacking processes, and the clients that request attacks, have the
lowest priority, so that the proxy slows the other client, not a lack of cores. Measured for each
attack: the latency of the other client, how long its records take to be stored, the most memory of
worker and ingester, the worker's memory ten seconds later, and CPU of both.

`--checkout FOLDER` runs another checkout's proxy instead, for a comparison by hand; `--only NAME`
runs the attacks with NAME in their names, `--others N` is the number of the other client's calls,
`--calls N` the number of identical calls in a separate measurement (0: none).
"""

import argparse
import asyncio
import json
import os
import re
import socketserver
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import takewhile
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
WORKER_MB, INGESTER_MB, STORED_S, PINGS_MS, LATE_TIMES = 300, 300, 2.0, 20, 2
LATER_S, REST_S = 10.0, 120.0
PAUSE_S, POLL_S = 0.01, 0.05
LOWEST: Final = 19
OK: Final = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\n%b\r\n\r\n"


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
    """Yield `size` bytes of one repeated letter, after `begin` and before `end`."""
    yield begin
    for _ in range(size // 2**17):
        yield b"x" * 2**17
    yield end


LONG: Final = b'data: {"choices":[{"index":0,"delta":{"content":"'


@dataclass(frozen=True)
class Attack:
    """An attack: its bytes, how many at once, and its time limit (None: to its end).

    `mb` is its size, if it has an end and is to be stored.
    """

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


class Upstream(socketserver.StreamRequestHandler):
    """Answers one connection's requests, with the attack that the model names or with `REPLY`."""

    def handle(self) -> None:
        with suppress(OSError):
            while head := b"".join(takewhile(lambda line: line != b"\r\n", self.rfile)):
                size = int((head.lower().partition(b"content-length: ")[2] or b"0").split()[0])
                body = self.rfile.read(size) if size else b"{}"
                attack = ATTACKS.get(json.loads(body).get("model", ""))
                if attack is not None:
                    os.nice(LOWEST)
                    self._attack(attack)
                    return
                answer = b'{"data": []}' if head.startswith(b"GET") else REPLY
                self.wfile.write(OK % (JSON.encode(), b"Content-Length: %d" % len(answer)) + answer)

    def _attack(self, attack: Attack) -> None:
        self.wfile.write(
            OK % (attack.kind.encode(), b"Connection: close\r\nTransfer-Encoding: chunked")
        )
        if attack.one_chunk:
            self.wfile.write(b"%x\r\n" % attack.one_chunk)
        for piece in filter(None, attack.pieces()):
            self.wfile.write(piece if attack.one_chunk else b"%x\r\n%b\r\n" % (len(piece), piece))
        self.wfile.write(b"\r\n0\r\n\r\n" if attack.one_chunk else b"0\r\n\r\n")


class UpstreamServer(socketserver.ForkingTCPServer):
    """A server with a process for each connection."""

    request_queue_size = 128
    max_children = 200


@dataclass
class Seen:
    """Measurements during an attack; times in seconds, memory in bytes.

    `late` and `stored` have, for each of the other client's calls, the time until its reply, and
    from then until its record was stored. `own_s` is the latter of the attack's own call.
    """

    late: list[float] = field(default_factory=list)
    stored: list[float] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)
    later: int = 0
    attacks: int = 0
    own_s: float | None = None


class Watch:
    """Makes the other client's calls, and watches the proxy's processes."""

    def __init__(self, proxy: Proxy, session: aiohttp.ClientSession, pool: asyncpg.Pool) -> None:
        self._url = f"http://127.0.0.1:{proxy.port}/v1/chat/completions"
        self._session, self._pool = session, pool
        tree = psutil.Process(proxy.process.pid).children(recursive=True)
        listens = {
            c.laddr.port: p for p in tree for c in p.net_connections() if c.status == "LISTEN"
        }
        self._processes = {"worker": listens[proxy.port], "ingester": listens[proxy.admin]}

    async def call(self, model: str) -> str:
        body = {"model": model, "messages": []}
        async with self._session.post(self._url, json=body) as response:
            response.raise_for_status()
            await response.read()
            return response.headers["x-pawl-call"]

    async def attack(self, name: str) -> str | None:
        """Have curl request one attack, until its end or time limit; return the call's id."""
        attack, body = ATTACKS[name], {"model": name, "messages": [], "stream": True}
        curl = ["curl", "-sN", "--max-time", str(attack.within_s or REST_S)]
        curl += ["-o", "/dev/null", "-D", "-", "-d", json.dumps(body), self._url]
        process = await asyncio.create_subprocess_exec(
            *("nice", "-n", str(LOWEST), *curl), stdout=asyncio.subprocess.PIPE
        )
        head, _ = await process.communicate()
        found = re.search(rb"x-pawl-call: ([0-9a-f-]+)", head, re.IGNORECASE)
        return None if found is None else found[1].decode()

    async def stored_calls(self, calls: Sequence[str]) -> set[str]:
        found = await self._pool.fetch("SELECT id FROM transitions WHERE id = ANY($1)", calls)
        return {str(row[0]) for row in found}

    async def wait_until_stored(self, call: str, within_s: float) -> float | None:
        began = time.perf_counter()
        while (took := time.perf_counter() - began) < within_s:
            if await self.stored_calls([call]):
                return took
            await asyncio.sleep(POLL_S)
        return None

    async def watch_during(self, attack: Attack | None, name: str, others: int) -> Seen:
        """Make `others` calls, one after the other, while an attack is repeated; return figures."""
        seen, is_over = Seen(), asyncio.Event()
        cpu = {who: sum(p.cpu_times()[:2]) for who, p in self._processes.items()}
        waiting: dict[str, float] = {}

        async def storing() -> None:
            while waiting or not is_over.is_set():
                for call in await self.stored_calls(list(waiting)) if waiting else ():
                    seen.stored.append(time.perf_counter() - waiting.pop(call))
                await asyncio.sleep(POLL_S)

        async def memory() -> None:
            while True:
                for who, process in self._processes.items():
                    seen.memory[who] = max(seen.memory.get(who, 0), process.memory_info().rss)
                await asyncio.sleep(POLL_S)

        async def attacks(first: bool) -> None:
            while attack is not None and not is_over.is_set():
                call = await self.attack(name)
                seen.attacks += 1
                if attack.mb and call is not None and first and seen.own_s is None:
                    seen.own_s = await self.wait_until_stored(call, REST_S)

        watching, storage = asyncio.create_task(memory()), asyncio.create_task(storing())
        at_once = range(0 if attack is None else attack.at_once)
        attackers = [asyncio.create_task(attacks(number == 0)) for number in at_once]
        for _ in range(others):
            began = time.perf_counter()
            call = await self.call("m")
            waiting[call] = time.perf_counter()
            seen.late.append(waiting[call] - began)
            await asyncio.sleep(PAUSE_S)
        is_over.set()
        await asyncio.gather(storage, *attackers)
        watching.cancel()
        seen.cpu = {w: sum(p.cpu_times()[:2]) - cpu[w] for w, p in self._processes.items()}
        if attack is not None:
            await asyncio.sleep(LATER_S)
            seen.later = self._processes["worker"].memory_info().rss
        return seen


async def measure_equal_calls(watch: Watch, calls: int) -> list[float]:
    """Make equal calls, and return the stored calls a second for each tenth of them."""
    rates = []
    for _ in range(10):
        began, last = time.perf_counter(), ""
        for _ in range(0, calls // 10, 50):
            last = (await asyncio.gather(*(watch.call("m") for _ in range(50))))[-1]
        await watch.wait_until_stored(last, REST_S)
        rates.append(calls / 10 / (time.perf_counter() - began))
    return rates


async def measure_attacks(proxy: Proxy, options: argparse.Namespace) -> AsyncIterator[Rows]:
    lines, bars = [], []
    async with aiohttp.ClientSession() as session, asyncpg.create_pool(proxy.database_url) as pool:
        watch = Watch(proxy, session, pool)
        await watch.watch_during(None, "", options.others // 10)
        for name, attack in ATTACKS.items():
            if options.only not in name:
                continue
            quiet = await watch.watch_during(None, "", options.others // 4)
            before = watch._processes["worker"].memory_info().rss / MB
            seen = await watch.watch_during(attack, name, options.others)
            worker, ingester = (seen.memory[who] / MB for who in ("worker", "ingester"))
            alone, late = (1000 * percentile(one.late, 0.99) for one in (quiet, seen))
            read_mb = attack.mb * seen.attacks
            cpu = [
                1000 * (seen.cpu[who] - 4 * quiet.cpu[who]) / read_mb if read_mb else None
                for who in seen.cpu
            ]
            stored = max(seen.stored)
            figures = [(seen.own_s, 1), (alone, 1), (late, 1), (stored, 1), (worker, 0)]
            figures += [(before, 0), (seen.later / MB, 0), (ingester, 0)]
            figures += [(one, 0) for one in cpu]
            lines.append([name, *(number(value, digits) for value, digits in figures)])
            bars.append(Bar(f"{name}: worker, MB", worker, WORKER_MB))
            bars.append(Bar(f"{name}: worker 10 s later, MB more", seen.later / MB - before, 40))
            bars.append(Bar(f"{name}: p99 of others, times", late / alone, LATE_TIMES))
            bars.append(Bar(f"{name}: others stored after, s", stored, STORED_S))
            if name.startswith("comments"):
                bars.append(Bar("comments: CPU, ms/MB", sum(one or 0.0 for one in cpu), PINGS_MS))
                bars.append(Bar("comments: ingester, MB", ingester, INGESTER_MB))
            if name == "text, 150 MB":
                bars.append(Bar(f"{name}: stored after, s", seen.own_s, 10))
        if calls := options.calls:
            rates = await measure_equal_calls(watch, calls)
            lines.append([f"{calls:,} equal calls, stored/s", number(rates[0]), number(rates[-1])])
            lines[-1] += [NONE] * 8
            bars.append(Bar("equal calls: last tenth to first", rates[-1] / rates[0], 0.8, True))
    heads = ["", "own stored s", "others p99 ms, alone", "beside", "stored s", "worker MB"]
    heads += ["before", "10 s later", "ingester MB", "worker ms/MB", "ingester ms/MB"]
    yield Rows("Hostile replies", heads, lines, [f"others: {options.others} calls in turns"])
    yield bars_table(bars)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkout", type=Path, default=ROOT)
    parser.add_argument("--only", default="")
    parser.add_argument("--others", type=int, default=2000)
    parser.add_argument("--calls", type=int, default=0)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        UpstreamServer(("127.0.0.1", options.serve), Upstream).serve_forever()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        port = free_port()
        command = [sys.executable, "-m", "benchmarks.hostile", "--serve", str(port)]
        stack.enter_context(running(command, folder / "upstream.log"))
        proxy = stack.enter_context(running_proxy(folder, port, options.checkout.resolve()))
        async for rows in measure_attacks(proxy, options):
            Console(width=180, file=sys.stdout).print(rows.rich())


if __name__ == "__main__":
    asyncio.run(main())
