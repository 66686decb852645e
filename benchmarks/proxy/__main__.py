"""Compare Pawl with nginx, LiteLLM and Agent Lightning, on one core each.

Measured are calls without streaming (wrk, 1 and 64 at once, 4 KB prompts, 2.9 KB replies with ids;
100 KB replies) and streams (1, 256 and 1,000 at once, ten chunks a second each). For the former all
peers run and take turns, since a shared machine is never the same twice. The measured peer has one
core with all its processes, Pawl's PostgreSQL included; load and model server share another core.
Needs nginx and wrk (Debian: nginx-light, wrk).

`--against CHECKOUT` measures this checkout in turns with another one instead (a folder, such as
`git worktree add` makes), without streams: the ratios of the figures in pairs of turns.
`--seconds 45 --rounds 15` makes turns of three seconds each.
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, Final
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen
from uuid import uuid4

import asyncpg
import psutil
from rich.console import Console

from benchmarks import wire
from benchmarks.proxy import peers as places
from benchmarks.proxy.peers import CONTENDERS, LOAD_CORE, MEASURED_CORE, Contender, Running
from benchmarks.proxy.streams import Plan
from benchmarks.report import NONE, Bar, Rows, bars_table, number, plotting, write_figures
from benchmarks.stack import ROOT, NotUp, answers, free_port, on_core, running, wait_for

PAGE: Final = ROOT / "docs" / "explanation" / "measurements.md"
PICTURE: Final = ROOT / "docs" / "images" / "benchmarks.png"
WORK: Final = ROOT / "var" / "bench"
ALONE, MANY, LARGE_AT_ONCE = 1, 64, 8
STREAMS: Final = (1, 256, 1000)
INTERVAL_S, CHUNKS = 0.1, 50
SAMPLE, WARM_S, STORED_S = 20, 2, 600.0
# Characters of a prompt to which the model server sends the large reply.
LARGE_CHARS: Final = 10
# Calls at once, and the characters of their prompts.
LOADS: Final = {
    ALONE: wire.PROMPT_CHARS,
    MANY: wire.PROMPT_CHARS,
    LARGE_AT_ONCE: LARGE_CHARS,
}
QUIET_SHARE: Final = 0.1
# Groups of processes, by the names that `--against` shows.
CPU: Final = {"serving": "worker", "beside": "ingester", "postgres": "PostgreSQL"}
MILLISECONDS: Final = {"us": 0.001, "ms": 1.0, "s": 1000.0, "m": 60_000.0}


class WrongAnswer(Exception):
    """A peer's answer is not the model server's."""


@dataclass(frozen=True, slots=True)
class Calls:
    """Measurements of calls without streaming; `cpu_us` is for each call, by group of processes.

    For a peer that stores calls, `stored` is the number of stored calls, and `drain_s` the seconds
    from the end of the load until the last one was stored.
    """

    calls: int
    failed: int
    calls_per_s: float
    median_ms: float
    p99_ms: float
    cpu_us: Mapping[str, float]
    stored: int | None = None
    drain_s: float | None = None

    @property
    def sustained_per_s(self) -> float | None:
        """Return the calls a second until all calls were stored; None if the peer stores none."""
        if self.drain_s is None:
            return None
        return self.calls / (self.calls / self.calls_per_s + self.drain_s)


@dataclass(slots=True)
class Peer:
    """The measurements of a peer, or the reason why it is missing."""

    contender: Contender
    missing: str = ""
    # Results of each round, by the number of calls at once.
    rounds: dict[int, list[Calls]] = field(default_factory=dict)
    calls: dict[int, Calls] = field(default_factory=dict)
    streams: dict[int, dict[str, Any]] = field(default_factory=dict)
    memory_mib: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.contender.name


def main() -> None:
    options = parse_arguments()
    for tool in ("nginx", "wrk"):
        if shutil.which(tool) is None:
            sys.exit(f"benchmarks.proxy needs {tool}: install it (Debian: nginx-light, wrk)")
    if not {LOAD_CORE, MEASURED_CORE} <= os.sched_getaffinity(0):
        sys.exit("benchmarks.proxy needs the cores 0 and 1")
    console = Console(stderr=options.json, width=None if sys.stdout.isatty() else 220)
    busy = psutil.cpu_percent(1.0) / 100
    if busy > QUIET_SHARE:
        console.print(f"other programs use {busy:.0%} of this machine: the figures will be too low")
    os.sched_setaffinity(0, {LOAD_CORE})
    round_s = max(1, options.seconds // options.rounds)
    if options.against is not None:
        ratios = compare_checkouts(options.against, options.rounds, round_s, console)
        console.print(ratios_table(ratios, str(options.against), options.rounds).rich())
        if options.json:
            print(json.dumps(ratios))
        return
    peers = {name: Peer(CONTENDERS[name]) for name in options.peers}
    measure_calls(list(peers.values()), options.rounds, round_s, console)
    for peer in peers.values():
        if not (peer.missing or peer.contender.no_streams):
            measure_streams(peer, options.seconds, console)
    promises = bars(peers)
    tables = [calls_table(peers.values()), streams_table(peers.values())]
    for table in [*tables, bars_table(promises)]:
        console.print(table.rich())
    if options.write:
        write_figures(PAGE, tables, promises, describe_machine(), PICTURE.name)
        draw(peers.values())
    if options.json:
        judged = {bar.name: bar._asdict() | {"holds": bar.holds} for bar in promises}
        rows = {table.title: [table.heads, *table.lines] for table in tables}
        print(json.dumps({"bars": judged, "tables": rows, "busy_before": busy}))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.proxy", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seconds", type=int, default=10, help="of each load (10)")
    parser.add_argument("--rounds", type=int, default=5, help="in which whole calls take turns (5)")
    parser.add_argument(
        "--peers",
        type=lambda given: given.split(","),
        default=list(CONTENDERS),
        help=f"some of {','.join(CONTENDERS)}",
    )
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="compare with a checkout")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name} and its picture")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args()
    if unknown := set(options.peers) - CONTENDERS.keys():
        parser.error(f"no peer {unknown.pop()}: choose of {', '.join(CONTENDERS)}")
    return options


def measure_calls(peers: Sequence[Peer], rounds: int, round_s: int, console: Console) -> None:
    """Start all peers, and measure them in turns, round by round."""
    with ExitStack() as stack:
        up: list[tuple[Peer, Running, Path]] = []
        for peer in peers:
            with missing_unless_ours(peer, console):
                places.install(peer.contender, console)
                up.append((peer, *bring_up(peer.contender, stack)))
        for at_once, chars in LOADS.items():
            console.print(f"{at_once} at once, prompts of {chars} characters, {rounds} rounds")
            for _ in range(rounds):
                for peer, started, folder in up:
                    if not peer.missing:
                        with missing_unless_ours(peer, console):
                            calls = load_calls(started, folder, round_s, at_once, chars)
                            peer.rounds.setdefault(at_once, []).append(calls)
            for peer, started, _ in up:
                if not peer.missing:
                    peer.calls[at_once] = combine_rounds(peer.rounds[at_once])
                    note_memory(peer, started)


@contextmanager
def missing_unless_ours(peer: Peer, console: Console) -> Iterator[None]:
    """Mark a failing peer as missing, or raise its error if it is not an installed product."""
    try:
        yield
    except (places.CannotInstall, NotUp, WrongAnswer) as error:
        if not peer.contender.packages:
            raise
        peer.missing = str(error).splitlines()[-1]
        console.print(f"{peer.name} is missing: {error}", markup=False)


@contextmanager
def work_folder() -> Iterator[Path]:
    """Make a folder on the checkout's disk, where syncs are real (unlike in a tmpfs)."""
    WORK.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=WORK) as name:
        yield Path(name)


def bring_up(contender: Contender, stack: ExitStack) -> tuple[Running, Path]:
    """Start a contender and its model server, check its answers, and warm it up."""
    upstream = free_port()
    with ExitStack() as own:
        folder = own.enter_context(work_folder())
        own.enter_context(places.model_server(folder, upstream))
        started = own.enter_context(contender.start(folder, upstream))
        check_answers(started)
        load_calls(started, folder, WARM_S, MANY, wire.PROMPT_CHARS)
        stack.push(own.pop_all())
    return started, folder


def check_answers(up: Running) -> None:
    """Check that replies are the model server's, and that Pawl hides the ids that it requested.

    Raises:
        WrongAnswer: a reply differs, or shows ids.
    """
    chars = [*[wire.PROMPT_CHARS] * SAMPLE, LARGE_CHARS]
    for index, length in enumerate(chars):
        headers, reply = one_call(up, wire.prompt(f"sample {index} ", length))
        choice = reply["choices"][0]
        tokens = places.LARGE_TOKENS if length == LARGE_CHARS else places.TOKENS
        if choice["message"]["content"] != "word " * (3 * tokens):
            raise WrongAnswer(f"another text: {choice['message']['content'][:80]!r}")
        shown = [choice.get("token_ids"), choice.get("logprobs"), reply.get("prompt_token_ids")]
        if up.database_url and (shown != [None, None, None] or "x-pawl-call" not in headers):
            raise WrongAnswer("a client that did not request ids got them")


def one_call(up: Running, body: str) -> tuple[set[str], Any]:
    """Make one call; return the names of the reply's headers, and the reply."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {wire.KEY}"}
    try:
        with urlopen(Request(up.url, body.encode(), headers), timeout=30) as response:
            return {name.lower() for name in response.headers}, json.load(response)
    except HTTPError as error:
        raise WrongAnswer(f"{up.url} answers {error.code}: {error.read()[:200]!r}") from error


def load_calls(up: Running, folder: Path, seconds: int, at_once: int, chars: int) -> Calls:
    """Run wrk once, before and after which all calls are stored; return the measurements."""
    stored_before = wait_until_stored(up, 0)[0]
    watch = Watch(up)
    before = watch.cpu_seconds()
    script = folder / "calls.lua"
    script.write_text(wrk_script(up, chars))
    command = ["wrk", "-t1", f"-c{at_once}", f"-d{seconds}s", "--timeout", "30s", "--latency"]
    with on_core(LOAD_CORE):
        output = subprocess.run(
            [*command, "-s", str(script), up.url], check=True, capture_output=True, text=True
        ).stdout
    asked = int(match_output(r"(\d+) requests in", output)[0])
    refused = sum(map(int, match_output(r"Non-2xx or 3xx responses: (\d+)", output, "0")))
    errors = r"Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)"
    broken = sum(map(int, match_output(errors, output, "0")))
    calls = asked - refused
    if not calls:
        raise WrongAnswer(f"none of {at_once} calls at once was answered in {seconds} s")
    stored, drain_s = wait_until_stored(up, stored_before + calls)
    return Calls(
        calls=calls,
        failed=refused + broken,
        calls_per_s=float(match_output(r"Requests/sec:\s+([\d.]+)", output)[0]) * calls / asked,
        median_ms=latency_ms("50%", output),
        p99_ms=latency_ms("99%", output),
        cpu_us=cpu_us_per_call(before, watch.cpu_seconds(), calls),
        stored=stored - stored_before if up.database_url else None,
        drain_s=drain_s if up.database_url else None,
    )


def wrk_script(up: Running, chars: int) -> str:
    """Return a script for wrk that sends requests with a counter of fixed width."""
    zeros = "0" * 16
    body = wire.prompt(f"{uuid4().hex} {zeros} ", chars)
    headers = {"Authorization": f"Bearer {wire.KEY}"}
    request = wire.post(urlsplit(up.url).netloc, up.path, body, headers).decode()
    before, after = request.split(zeros)
    return f"""local number = 0
local before, after = [==[{before.replace(chr(13), "")}]==], [==[{after}]==]
before = before:gsub("\\n", "\\r\\n")
request = function()
  number = number + 1
  return before .. string.format("%016d", number) .. after
end
"""


def match_output(pattern: str, output: str, *default: str) -> Sequence[str]:
    """Return a pattern's groups in wrk's output, or the default; raise ValueError without one."""
    match = re.search(pattern, output)
    if match is None and not default:
        raise ValueError(f"wrk's output has no {pattern!r}:\n{output}")
    return default if match is None else match.groups()


def latency_ms(share: str, output: str) -> float:
    value, unit = match_output(rf"{share}\s+([\d.]+)(us|ms|s|m)\b", output)
    return float(value) * MILLISECONDS[unit]


def combine_rounds(rounds: Sequence[Calls]) -> Calls:
    """Combine the rounds of one load: the sums of counts, the medians of other figures."""
    is_stored = rounds[0].stored is not None
    return Calls(
        calls=sum(one.calls for one in rounds),
        failed=sum(one.failed for one in rounds),
        calls_per_s=median(one.calls_per_s for one in rounds),
        median_ms=median(one.median_ms for one in rounds),
        p99_ms=median(one.p99_ms for one in rounds),
        cpu_us={group: median(one.cpu_us[group] for one in rounds) for group in rounds[0].cpu_us},
        stored=sum(one.stored or 0 for one in rounds) if is_stored else None,
        drain_s=sum(one.drain_s or 0 for one in rounds) if is_stored else None,
    )


def measure_streams(peer: Peer, seconds: int, console: Console) -> None:
    """Measure a peer's streams, with each of the numbers in `STREAMS` at once."""
    upstream = free_port()
    server = [sys.executable, "-m", "benchmarks.upstream", str(upstream), str(INTERVAL_S)]
    with work_folder() as folder, missing_unless_ours(peer, console):
        log = folder / "model.log"
        with running(server, log, {}, LOAD_CORE) as process:
            wait_for(lambda: answers(f"http://127.0.0.1:{upstream}/v1/models"), process, log)
            with peer.contender.start(folder, upstream) as up:
                for at_once in STREAMS:
                    console.print(f"{peer.name}: {at_once} streams at once")
                    plan = Plan(up.port, up.path, at_once, CHUNKS, INTERVAL_S, seconds)
                    measured = load_streams(up, folder, plan)
                    if at_once == ALONE:
                        # The time to the first chunk is measured with streams of one chunk.
                        plan = Plan(up.port, up.path, at_once, 1, INTERVAL_S, seconds / 2)
                        single = load_streams(up, folder, plan)
                        for name in ("first_median_ms", "first_p99_ms"):
                            measured[name] = single[name]
                        for name in ("started", "batched"):
                            measured[name] += single[name]
                        measured["failed"] |= single["failed"]
                    peer.streams[at_once] = measured
                    note_memory(peer, up)


def load_streams(up: Running, folder: Path, plan: Plan) -> dict[str, Any]:
    """Run `benchmarks.proxy.streams` once; `cpu_us` is measured while its window is open."""
    stored = wait_until_stored(up, 0)[0]
    watch = Watch(up)
    cpu: list[dict[str, float]] = []
    measured: dict[str, Any] = {}
    command = [sys.executable, "-m", "benchmarks.proxy.streams", json.dumps(asdict(plan))]
    with (
        on_core(LOAD_CORE),
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as load,
    ):
        assert load.stdout is not None
        for line in load.stdout:
            measured = json.loads(line)
            if "now" in measured:
                cpu.append(watch.cpu_seconds())
    if load.returncode:
        raise RuntimeError("the generator of streams failed")
    wait_until_stored(up, stored + measured["started"] - sum(measured["failed"].values()))
    return measured | {"cpu_us": cpu_us_per_call(cpu[0], cpu[1], measured["chunks"])}


def wait_until_stored(up: Running, wanted: int) -> tuple[int, float]:
    """Wait until `wanted` calls are stored, and then until no more come.

    Return the number of stored calls, and the seconds until the wanted ones were stored. For a peer
    that stores no calls, return zeros at once.

    Raises:
        NotUp: answered calls are not in PostgreSQL after ten minutes.
    """
    if not up.database_url:
        return 0, 0.0
    return asyncio.run(_wait_until_stored(up.database_url, wanted))


async def _wait_until_stored(database_url: str, wanted: int) -> tuple[int, float]:
    began, drain_s, before = time.monotonic(), None, -1
    connection = await asyncpg.connect(database_url)
    try:
        while True:
            count = await connection.fetchval("SELECT count(*) FROM transitions")
            waited = time.monotonic() - began
            if drain_s is None and count >= wanted:
                drain_s = waited
            if drain_s is not None and count == before:
                return count, drain_s
            if waited > STORED_S:
                raise NotUp(f"{count} of {wanted} calls are stored after {waited:.0f} s")
            before = count
            await asyncio.sleep(0.25 if drain_s is None else 1.0)
    finally:
        await connection.close()


class Watch:
    """Measures CPU (with ended children) and memory of a peer's process trees, by group.

    Of the tree `proxy`, the processes that listen on the port are the group `serving`, all others
    the group `beside`.
    """

    def __init__(self, up: Running) -> None:
        self._roots = up.roots
        self._serving = {
            process.pid
            for process in self._tree("proxy")
            for at in process.net_connections("tcp")
            if at.status == "LISTEN" and at.laddr.port == up.port
        }

    def cpu_seconds(self) -> dict[str, float]:
        return self._sum(lambda process: sum(process.cpu_times()[:4]))

    def memory_mib(self) -> dict[str, float]:
        """Return the resident memory by group; shared pages count once (proportional set size)."""
        return self._sum(lambda process: process.memory_full_info().pss / 2**20)

    def _sum(self, of: Any) -> dict[str, float]:
        by_group: dict[str, float] = {}
        for name in self._roots:
            for process in self._tree(name):
                is_serving = process.pid in self._serving
                group = name if name != "proxy" else "serving" if is_serving else "beside"
                # A process may end meanwhile: its parent then has its CPU time.
                with suppress(psutil.NoSuchProcess):
                    by_group[group] = by_group.get(group, 0.0) + of(process)
        return by_group

    def _tree(self, name: str) -> list[psutil.Process]:
        if name not in self._roots:
            return []
        root = psutil.Process(self._roots[name])
        return [root, *root.children(recursive=True)]


def note_memory(peer: Peer, up: Running) -> None:
    """Store the largest memory of each group seen so far in `peer`."""
    for group, now in Watch(up).memory_mib().items():
        peer.memory_mib[group] = max(now, peer.memory_mib.get(group, 0.0))


def cpu_us_per_call(
    before: Mapping[str, float], after: Mapping[str, float], count: int
) -> dict[str, float]:
    return {
        group: 1e6 * (seconds - before.get(group, 0.0)) / max(1, count)
        for group, seconds in after.items()
    }


Ratios = dict[int, dict[str, list[float]]]


def compare_checkouts(checkout: Path, rounds: int, round_s: int, console: Console) -> Ratios:
    """Return the ratios of this checkout's figures to the other's, by calls at once.

    Both run at the same time, each with its own PostgreSQL and model server. A disturbance of the
    machine mostly lasts longer than a pair of loads, so that it affects both.
    """
    ratios: Ratios = {}
    with ExitStack() as stack:
        sides = [bring_up(places.of_checkout(path), stack) for path in (checkout, ROOT)]
        for at_once, chars in LOADS.items():
            ratios[at_once] = {}
            for turn in range(rounds):
                console.print(f"{at_once} at once, pair {turn + 1} of {rounds}")
                pair: list[Any] = [None, None]
                # The first load may affect the second, so the order alternates.
                for side in (0, 1) if turn % 2 else (1, 0):
                    pair[side] = load_calls(*sides[side], round_s, at_once, chars)
                theirs, ours = pair
                each = {
                    "calls/s": ours.calls_per_s / theirs.calls_per_s,
                    "median latency": ours.median_ms / theirs.median_ms,
                    "CPU a call": sum(ours.cpu_us.values()) / sum(theirs.cpu_us.values()),
                }
                for group, name in CPU.items():
                    each[f"{name}'s CPU a call"] = ours.cpu_us[group] / theirs.cpu_us[group]
                for name, ratio in each.items():
                    ratios[at_once].setdefault(name, []).append(ratio)
    return ratios


def ratios_table(ratios: Ratios, other: str, rounds: int) -> Rows:
    lines = [
        [
            f"{at_once} at once",
            *(f"{median(one):.2f} ({min(one):.2f} to {max(one):.2f})" for one in of.values()),
        ]
        for at_once, of in ratios.items()
    ]
    notes = [f"{rounds} pairs of turns each: the median, and the lowest and highest pair."]
    notes.append(f"Replies of 2.9 KB; {LARGE_AT_ONCE} at once: of 100 KB.")
    title = f"this checkout, in turns with {other}"
    return Rows(title, ["ratio", *ratios[MANY]], lines, notes)


def bars(peers: Mapping[str, Peer]) -> list[Bar]:
    """Return the limits for Pawl's figures; a figure that was not measured is None."""
    pawl = peers.get("pawl", Peer(CONTENDERS["pawl"]))
    many, most = pawl.calls.get(MANY), pawl.streams.get(STREAMS[-1])
    alone = [peers[name].calls.get(ALONE) for name in ("pawl", "direct") if name in peers]
    added_ms = None
    if len(alone) == 2 and alone[0] is not None and alone[1] is not None:
        added_ms = alone[0].median_ms - alone[1].median_ms
    large = pawl.calls.get(LARGE_AT_ONCE)
    # More calls may be stored than answered: the load broke off some at its end.
    unstored = None if many is None or many.stored is None else max(0, many.calls - many.stored)
    return [
        Bar("calls_per_nginx", ratio_to(peers, "nginx"), 1 / 9, at_least=True),
        Bar("calls_per_litellm", ratio_to(peers, "litellm"), 40, at_least=True),
        Bar("calls_per_agent_lightning", ratio_to(peers, "agent-lightning"), 13, at_least=True),
        Bar("calls_failed", many.failed if many else None, 0),
        Bar("calls_not_stored", unstored, 0),
        Bar("added_ms", added_ms, 0.8),
        Bar("large_reply_cpu_us", sum(large.cpu_us.values()) if large else None, 600),
        Bar("streams_failed", sum(most["failed"].values()) if most else None, 0),
        Bar("streams_batched", most["batched"] if most else None, 0),
        Bar("chunk_delay_p99_ms", most["delay_p99_ms"] if most else None, 10),
        Bar("first_chunk_p99_ms", most["first_p99_ms"] if most else None, 25),
        Bar("chunk_cpu_us", sum(most["cpu_us"].values()) if most else None, 80),
    ]


def ratio_to(peers: Mapping[str, Peer], other: str) -> float | None:
    """Return the median of Pawl's calls a second over the other peer's in the same round."""
    if "pawl" not in peers or other not in peers:
        return None
    own, others = (peers[name].rounds.get(MANY, []) for name in ("pawl", other))
    pairs = zip(own, others, strict=False)
    ratios = [ours.calls_per_s / theirs.calls_per_s for ours, theirs in pairs]
    return median(ratios) if ratios else None


def calls_table(peers: Iterable[Peer]) -> Rows:
    heads = ["through", f"calls/s at {MANY}", "until stored", "failed", f"median ms at {MANY}"]
    heads += ["p99 ms", f"median ms at {ALONE}", "p99 ms", "CPU µs a call", "100 KB: CPU µs"]
    heads += ["memory MiB"]
    lines, notes = [], []
    for peer in peers:
        title, alone, many = peer.contender.title, peer.calls.get(ALONE), peer.calls.get(MANY)
        if alone is None or many is None:
            lines.append([title, "missing", *[NONE] * (len(heads) - 2)])
            notes.append(f"{title} is missing: {peer.missing}.")
            continue
        lines.append(
            [
                title,
                number(many.calls_per_s),
                number(many.sustained_per_s),
                number(many.failed),
                number(many.median_ms, 2),
                number(many.p99_ms, 2),
                number(alone.median_ms, 3),
                number(alone.p99_ms, 3),
                format_parts(many.cpu_us),
                format_parts(
                    peer.calls[LARGE_AT_ONCE].cpu_us if LARGE_AT_ONCE in peer.calls else {}
                ),
                format_parts(peer.memory_mib),
            ]
        )
    return Rows("Whole calls", heads, lines, notes)


def streams_table(peers: Iterable[Peer]) -> Rows:
    heads = ["through", "at once", "started", "failed", "batched", "first chunk: median ms", "p99"]
    heads += ["chunk delay: median ms", "p99", "CPU µs a chunk"]
    lines, notes = [], []
    for peer in peers:
        title = peer.contender.title
        if not peer.streams:
            lines.append([title, "none", *[NONE] * (len(heads) - 2)])
            reason = peer.missing or peer.contender.no_streams
            notes.append(f"{title} has no streams: {reason}.")
        for at_once, one in peer.streams.items():
            reasons = ", ".join(f"{count} {reason}" for reason, count in one["failed"].items())
            failed = number(sum(one["failed"].values())) + (f" ({reasons})" if reasons else "")
            times = ("first_median_ms", "first_p99_ms", "delay_median_ms", "delay_p99_ms")
            lines.append(
                [
                    *(title, number(at_once), number(one["started"]), failed),
                    number(one["batched"]),
                    *(number(one[name], 2) for name in times),
                    # With one stream the CPU time is too small to measure.
                    format_parts(one["cpu_us"] if at_once > ALONE else {}),
                ]
            )
    return Rows("Streams of ten chunks a second", heads, lines, notes)


def format_parts(of: Mapping[str, float]) -> str:
    """Format the sum of the values, and each by name if there are several; a dash for none."""
    if not of:
        return NONE
    shown = ", ".join(f"{name} {number(value)}" for name, value in of.items())
    return number(sum(of.values())) + (f" ({shown})" if len(of) > 1 else "")


def describe_machine() -> str:
    model = "an unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{os.cpu_count()} cores of {model}, Python {sys.version.split()[0]}, {date.today()}"


def draw(peers: Iterable[Peer]) -> None:
    """Draw calls a second, latency and chunk delay as bars on logarithmic scales."""
    figure, panels = plotting().subplots(1, 3, figsize=(13, 3.4), dpi=150)
    there, most = [peer for peer in peers if MANY in peer.calls], STREAMS[-1]
    drawn = {
        f"calls/s, {MANY} at once": {one.name: one.calls[MANY].calls_per_s for one in there},
        f"ms, p99, {MANY} at once": {one.name: one.calls[MANY].p99_ms for one in there},
        f"ms, chunk p99, {most:,} streams": {
            one.name: one.streams[most]["delay_p99_ms"] for one in there if most in one.streams
        },
    }
    for axes, (title, values) in zip(panels, drawn.items(), strict=True):
        colours = ["#0b7285" if name == "pawl" else "#adb5bd" for name in values]
        drawn_bars = axes.barh(list(values), list(values.values()), color=colours)
        axes.bar_label(drawn_bars, [number(one, 0 if one > 100 else 2) for one in values.values()])
        axes.set_xscale("log")
        axes.margins(x=0.3)
        axes.invert_yaxis()
        axes.set_title(f"{title} (log scale)", fontsize=10)
        axes.set_xticks([])
        axes.minorticks_off()
        axes.spines["bottom"].set_visible(False)
    figure.tight_layout()
    figure.savefig(PICTURE)


if __name__ == "__main__":
    main()
