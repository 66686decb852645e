"""Send requests that are made to cost more than their sender pays, and measure the cost.

One worker of a real `pawl proxy`, is sent each kind 16 at once, each by
a connection of its own, while an ordinary call is made again and again beside them. Measured: the
worker's resident memory at its highest, and the slowest of the ordinary calls. Before each kind the
worker is replaced, so that no kind finds what another has left.
The longest stall of the machine itself at the time stands beside them (`benchmarks.witness`).

Ends with status 1 where a bar is missed: 300 MB, 300 ms.
"""

import argparse
import http.client
import socket
import sys
import tempfile
import threading
import time
from asyncio import run
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Final, NamedTuple

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.chaos.stand import Stand, standing
from benchmarks.witness import Witness

MOST_MB: Final = 300.0
MOST_MS: Final = 300.0
AT_ONCE: Final = 16
SIZE: Final = 8 * 2**20
TRAILERS: Final = 24 * 2**20
PATIENCE_S: Final = 60.0
SAMPLE_S: Final = 0.002
BETWEEN_CALLS_S: Final = 0.01
# So long ordinary calls are made before and after, so that there are some in any case.
AROUND_S: Final = 1.0
CHAT: Final = "/v1/chat/completions"
ORDINARY: Final = b'{"model":"m","messages":[{"role":"user","content":"q"}]}'


class Found(NamedTuple):
    """Hold what one kind of request did to a worker."""

    kind: str
    answers: dict[str, int]
    before_mb: float
    peak_mb: float
    # The slowest ordinary call while nothing hostile was sent: what the machine itself takes.
    calm_ms: float
    slowest_ms: float
    ordinary: int
    ordinary_failed: int
    # The longest stall of the machine and its disk meanwhile.
    machine_ms: float

    @property
    def missed(self) -> bool:
        """Return whether a bar is missed."""
        slow = self.slowest_ms > MOST_MS or self.ordinary_failed or not self.ordinary
        return bool(self.peak_mb > MOST_MB or slow)


def filled(before: bytes, unit: bytes, after: bytes) -> bytes:
    """Return a body of about `SIZE`, of the same again and again."""
    return before + unit * (SIZE // len(unit)) + after


def sized(path: str, body: bytes) -> bytes:
    """Return a request that says how long it is."""
    head = f"POST {path} HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def chunked(path: str, chunks: Iterable[bytes], trailers: bytes = b"") -> bytes:
    """Return a request in chunks."""
    head = f"POST {path} HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    told = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return head.encode() + told + b"0\r\n" + trailers + b"\r\n"


def in_twos(body: bytes) -> Iterable[bytes]:
    """Yield two bytes at a time."""
    return (body[start : start + 2] for start in range(0, len(body), 2))


MESSAGES: Final = b'{"model":"m","messages":['
KINDS: Final[dict[str, Callable[[], bytes]]] = {
    "24 MB of trailers": lambda: chunked(
        CHAT, [ORDINARY], (b"t: " + b"x" * 1000 + b"\r\n") * (TRAILERS // 1005)
    ),
    "/feedback, 8 MB of [],": lambda: sized("/feedback", filled(b"[", b"[],", b"[]]")),
    "the same in chunks": lambda: chunked(
        "/feedback", [filled(b"[", b"[],", b"[]]")[start : start + 65536] for start in
                      range(0, SIZE, 65536)]
    ),
    '/feedback, 1 MB of [],': lambda: sized("/feedback", b"[" + b"[]," * (2**20 // 3) + b"[]]"),
    'chat, 8 MB of {"":0},': lambda: sized(CHAT, filled(MESSAGES, b'{"":0},', b"{}]}")),
    "chat, 8 MB in 2-byte chunks": lambda: chunked(
        CHAT, in_twos(filled(MESSAGES + b'{"role":"user","content":"', b"word ", b'"}]}'))
    ),
    "chat, 8 MB of short messages": lambda: sized(
        CHAT, filled(MESSAGES, b'{"role":"user","content":"q"},', b"{}]}")
    ),
    "chat, 90,000 short messages": lambda: sized(
        CHAT, MESSAGES + b'{"role":"user","content":"q"},' * 90_000 + b"{}]}"
    ),
    "chat, 8 MB of text": lambda: sized(
        CHAT, filled(MESSAGES + b'{"role":"user","content":"', b"word ", b'"}]}')
    ),
    "chat, 5,000 deep": lambda: sized(
        CHAT, b'{"model":"m","stop":' + b"[" * 5000 + b"]" * 5000 + b"}"
    ),
}  # fmt: skip


def attack(port: int, request: bytes) -> str:
    """Send a request; the status that comes back, or how the connection ended."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
            # Who refuses early closes while we still send; its answer is there all the same.
            with suppress(ConnectionError):
                connection.sendall(request)
            head = connection.recv(4096)
            return head.split(b" ", 2)[1].decode() if head else "closed"
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return type(error).__name__


def attack_at_once(port: int, kind: str, at_once: int) -> dict[str, int]:
    """Send so many requests of a kind at once; how many of them were answered how."""
    request = KINDS[kind]()
    answers: Counter[str] = Counter()

    def send() -> None:
        answers[attack(port, request)] += 1

    senders = [threading.Thread(target=send) for _ in range(at_once)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    return dict(answers)


class Ordinary:
    """Make an ordinary call again and again until told to stop."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._stop = threading.Event()
        self.seconds: list[float] = []
        self.failed = 0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Ordinary":
        self._thread.start()
        time.sleep(AROUND_S)
        return self

    def __exit__(self, *_: object) -> None:
        time.sleep(AROUND_S)
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(BETWEEN_CALLS_S):
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
            begun = time.perf_counter()
            try:
                connection.request("POST", CHAT, ORDINARY)
                reply = connection.getresponse()
                reply.read()
                self.failed += reply.status != 200
            except OSError:
                self.failed += 1
            finally:
                connection.close()
            self.seconds.append(time.perf_counter() - begun)


class Peak:
    """Watch the highest resident memory of a process, all the time."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self._stop = threading.Event()
        self.first = self.most = process.memory_info().rss
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            with suppress(psutil.NoSuchProcess):
                self.most = max(self.most, self._process.memory_info().rss)


def measure(stand: Stand, kind: str, at_once: int) -> Found:
    """Measure one kind of request, so many at once."""
    [worker] = stand.processes("worker")
    # In a process of its own: the ordinary calls must not wait for the attackers' GIL.
    with (
        get_context("spawn").Pool(1) as attackers,
        Peak(worker) as peak,
        Witness(stand.log.parent) as witness,
        Ordinary(stand.port) as ordinary,
    ):
        calm = list(ordinary.seconds)
        answers = attackers.apply(attack_at_once, (stand.port, kind, at_once))
    return Found(
        kind=kind,
        answers=answers,
        before_mb=peak.first / 1e6,
        peak_mb=peak.most / 1e6,
        calm_ms=max(calm, default=0.0) * 1000,
        slowest_ms=max(ordinary.seconds, default=0.0) * 1000,
        ordinary=len(ordinary.seconds),
        ordinary_failed=ordinary.failed,
        machine_ms=witness.longest_s * 1000,
    )


def measure_all(stand: Stand, kinds: Iterable[str], at_once: int) -> list[Found]:
    """Measure each kind, at a worker that has seen no other."""
    found = []
    for kind in kinds:
        run(stand.ready())
        found.append(measure(stand, kind, at_once))
        run(stand.kill("worker", 0))
    return found


def show(found: Iterable[Found]) -> None:
    """Show the figures as a table."""
    heads = ("request", "answers", "MB before", "MB at most", "calm ms", "slowest ms", "machine ms")
    table = Table(*heads, "calls")
    for one in found:
        answers = ", ".join(f"{how} × {count}" for how, count in sorted(one.answers.items()))
        colour = "red" if one.missed else "green"
        ordinary = f"{one.ordinary} ({one.ordinary_failed} failed)"
        table.add_row(
            one.kind,
            answers,
            f"{one.before_mb:.0f}",
            f"[{colour}]{one.peak_mb:.0f}[/]",
            f"{one.calm_ms:.0f}",
            f"[{colour}]{one.slowest_ms:.0f}[/]",
            f"{one.machine_ms:.0f}",
            ordinary,
        )
    Console(width=110).print(table)


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--at-once", type=int, default=AT_ONCE)
    parser.add_argument("--only", action="append", choices=list(KINDS), help="a kind of request")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="pawl-hostile-") as folder,
        standing(Path(folder), workers=1) as stand,
    ):
        found = measure_all(stand, options.only or KINDS, options.at_once)
    show(found)
    print(f"bars: {MOST_MB:g} MB, {MOST_MS:g} ms")
    sys.exit(any(one.missed for one in found))


if __name__ == "__main__":
    main()
