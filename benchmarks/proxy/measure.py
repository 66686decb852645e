"""Take all peers through everything: whole calls and the large reply in turns, then streams."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from benchmarks.proxy import probe, wrk
from benchmarks.proxy.figures import ALONE, MANY, STREAMS, Calls, Peer, Streams, combined
from benchmarks.proxy.machine import LOAD_CORE, NotUp, Watch, on_core, running, wait_for
from benchmarks.proxy.peers.contenders import Contender, Running
from benchmarks.proxy.peers.install import CannotInstall
from benchmarks.proxy.peers.nginx import LARGE_TOKENS, TOKENS, model_server, nginx
from benchmarks.proxy.stream_client import Plan, as_argument
from benchmarks.proxy.wire import PROMPT_CHARS
from benchmarks.stack import free_port

WORK = Path("var/bench")
INTERVAL_S = 0.1
CHUNKS = 50
WARM_S = 2
SAMPLE = 20
LARGE_AT_ONCE = 8
SMALL_PROMPT_CHARS = 10


@dataclass(frozen=True, slots=True)
class Lengths:
    """Set how long each load lasts, in how many rounds, and how many streams at once in turn."""

    seconds: int
    rounds: int
    streams: tuple[int, ...] = STREAMS

    @property
    def round_s(self) -> int:
        """Return a round's part of whole calls, in whole seconds as wrk wants them."""
        return max(1, self.seconds // self.rounds)


def measured(
    contenders: Sequence[Contender], lengths: Lengths, console: Console
) -> dict[str, Peer]:
    """Return each one's row; one that cannot be had says why."""
    peers = {c.name: Peer(c.name, c.version, no_streams=c.no_streams) for c in contenders}
    there = [c for c in contenders if _installed(c, peers[c.name], console)]
    there = _whole_calls(there, peers, lengths, console)
    for contender in there:
        if contender.no_streams:
            continue
        with _missing_unless_ours(contender, peers[contender.name], console):
            _streams(contender, peers[contender.name], lengths, console)
    return peers


@contextmanager
def _missing_unless_ours(contender: Contender, peer: Peer, console: Console) -> Iterator[None]:
    """Note a peer that fails as missing from the table; where it is no peer, measure nothing."""
    try:
        yield
    except (CannotInstall, NotUp, probe.WrongAnswer) as error:
        if contender.environment is None:
            raise
        peer.missing = str(error).splitlines()[0]
        console.print(f"{contender.name} is missing: {error}", markup=False)


def _installed(contender: Contender, peer: Peer, console: Console) -> bool:
    with _missing_unless_ours(contender, peer, console):
        if contender.environment is not None:
            contender.environment.ensure(console)
    return not peer.missing


@contextmanager
def _folder() -> Iterator[Path]:
    """Make a folder on the disk that the checkout is on: syncs must be real ones."""
    WORK.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=WORK.resolve()) as name:
        yield Path(name)


class Up(NamedTuple):
    """Hold a contender that answers, the folder that its load may use, and its row."""

    contender: Contender
    running: Running
    folder: Path
    peer: Peer


def _whole_calls(
    contenders: Sequence[Contender], peers: Mapping[str, Peer], lengths: Lengths, console: Console
) -> list[Contender]:
    """Bring all up at once, and let them take turns; return those that answered to the end."""
    with ExitStack() as stack:
        up: list[Up] = []
        for contender in contenders:
            peer = peers[contender.name]
            with _missing_unless_ours(contender, peer, console):
                up.append(Up(contender, *brought_up(contender, stack), peer))
        for at_once in (ALONE, MANY):
            for one, rounds in _rounds(up, lengths, console, at_once, PROMPT_CHARS):
                one.peer.calls[at_once] = combined(rounds)
                if at_once == MANY:
                    one.peer.rounds_per_s = [found.calls_per_s for found in rounds]
                    _note_memory(one.peer, one.running)
        for one, rounds in _rounds(up, lengths, console, LARGE_AT_ONCE, SMALL_PROMPT_CHARS):
            one.peer.large = combined(rounds)
    return [one.contender for one in up if not one.peer.missing]


def brought_up(contender: Contender, stack: ExitStack) -> tuple[Running, Path]:
    """Bring one up with a model server of its own, check that it answers right, and warm it."""
    upstream = free_port()
    with ExitStack() as own:
        folder = own.enter_context(_folder())
        server = model_server(upstream, folder)
        own.enter_context(nginx(folder / "model", upstream, server, LOAD_CORE))
        started = own.enter_context(contender.start(folder, upstream))
        _check(started)
        load_once(started, folder, WARM_S, MANY)
        stack.push(own.pop_all())
    return started, folder


def _rounds(
    up: Sequence[Up], lengths: Lengths, console: Console, at_once: int, chars: int
) -> list[tuple[Up, list[Calls]]]:
    """Run each one's rounds; whoever fails in one is missing from then on."""
    console.print(f"{at_once} at once, prompts of {chars} characters, {lengths.rounds} rounds")
    found: list[tuple[Up, list[Calls]]] = [(one, []) for one in up]
    for _ in range(lengths.rounds):
        for one, rounds in found:
            if not one.peer.missing:
                with _missing_unless_ours(one.contender, one.peer, console):
                    calls = load_once(one.running, one.folder, lengths.round_s, at_once, chars)
                    rounds.append(calls)
    return [(one, rounds) for one, rounds in found if not one.peer.missing]


def _check(up: Running) -> None:
    for number in range(SAMPLE):
        headers, reply = probe.one_call(up.url, f"sample {number} ", key=up.key)
        probe.check_reply(reply, TOKENS)
        if up.ledger is not None:
            probe.check_hidden(headers, reply)
    large = probe.one_call(up.url, "large ", SMALL_PROMPT_CHARS, up.key)[1]
    probe.check_reply(large, LARGE_TOKENS)


def load_once(
    up: Running, folder: Path, seconds: int, at_once: int, chars: int = PROMPT_CHARS
) -> Calls:
    """Run wrk once; a peer that stores has stored all before and after."""
    before_stored = 0 if up.ledger is None else up.ledger.settled(0)[0]
    watch = Watch(up.roots, up.port)
    before = watch.cpu_seconds()
    seen = wrk.run(up.url, folder, seconds, at_once, chars, up.key)
    if not seen.calls:
        raise probe.WrongAnswer(f"none of {at_once} calls at once was answered in {seconds} s")
    stored, drain_s = None, None
    if up.ledger is not None:
        count, drain_s = up.ledger.settled(before_stored + seen.calls)
        stored = count - before_stored
    return Calls(
        at_once=at_once,
        calls=seen.calls,
        failed=seen.failed,
        calls_per_s=seen.calls_per_s,
        median_ms=seen.median_ms,
        p99_ms=seen.p99_ms,
        cpu_us=_each_us(before, watch.cpu_seconds(), seen.calls),
        stored=stored,
        drain_s=drain_s,
    )


def _each_us(
    before: Mapping[str, float], after: Mapping[str, float], count: int
) -> dict[str, float]:
    return {
        group: 1e6 * (seconds - before.get(group, 0.0)) / max(1, count)
        for group, seconds in after.items()
    }


def _note_memory(peer: Peer, up: Running) -> None:
    """Note the most that was seen."""
    for group, now in Watch(up.roots, up.port).memory_mib().items():
        peer.memory_mib[group] = max(now, peer.memory_mib.get(group, 0.0))


def _streams(contender: Contender, peer: Peer, lengths: Lengths, console: Console) -> None:
    upstream = free_port()
    command = [sys.executable, "-m", "benchmarks.proxy.stream_server"]
    command += [str(upstream), str(INTERVAL_S)]
    with _folder() as folder:
        log = folder / "model.log"
        with running(command, LOAD_CORE, log) as server:
            models = f"http://127.0.0.1:{upstream}/v1/models"
            wait_for(lambda: probe.answers(models), server, log)
            with contender.start(folder, upstream) as up:
                for at_once in lengths.streams:
                    console.print(f"{contender.name}: {at_once} streams at once")
                    peer.streams[at_once] = _streams_at_once(up, folder, at_once, lengths.seconds)
                    _note_memory(peer, up)


def _streams_at_once(up: Running, folder: Path, at_once: int, seconds: int) -> Streams:
    """Run streams of five seconds; one at a time, first chunks come from streams of one chunk."""
    found = _load(up, folder, Plan(up.port, up.path, at_once, CHUNKS, INTERVAL_S, seconds))
    if at_once == ALONE:
        single = _load(up, folder, Plan(up.port, up.path, at_once, 1, INTERVAL_S, seconds / 2))
        for name in ("first_median_ms", "first_p99_ms"):
            found[name] = single[name]
        for name in ("started", "batched"):
            found[name] += single[name]
        found["failed"] |= single["failed"]
    return Streams(at_once=at_once, **found)


def _load(up: Running, folder: Path, plan: Plan) -> dict[str, Any]:
    """Run the generator once; CPU is what was used while its window was open."""
    stored = 0 if up.ledger is None else up.ledger.settled(0)[0]
    watch = Watch(up.roots, up.port)
    cpu: list[dict[str, float]] = []
    command = [sys.executable, "-m", "benchmarks.proxy.stream_client", as_argument(plan)]
    found: dict[str, Any] = {}
    with (
        (folder / "load.log").open("ab") as log,
        on_core(LOAD_CORE),
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as load,
    ):
        assert load.stdout is not None
        for line in load.stdout:
            found = json.loads(line)
            if "now" in found:
                cpu.append(watch.cpu_seconds())
    if load.returncode != 0:
        raise RuntimeError(f"the generator failed:\n{(folder / 'load.log').read_text()}")
    found["cpu_us"] = _each_us(cpu[0], cpu[1], found["chunks"])
    if up.ledger is not None:
        ended = found["started"] - sum(found["failed"].values())
        up.ledger.settled(stored + ended)
    return found
