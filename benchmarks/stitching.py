"""Measure whether calls without an episode's name are joined to the right episodes.

A thousand episodes of five clients (openai, LangChain, the Agents SDK on the Responses API,
AutoGen, anthropic) run interleaved in random order, without any naming header. Each is replayed
from a recording of the client's real requests (`benchmarks/recordings`), with new ids and a new
number. The requests pass the product's identification: in one proxy, and in three that share only
the ledger's joins.
"""

import argparse
import json
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any, Final, NamedTuple
from uuid import UUID

import msgspec
from rich.console import Console
from rich.table import Table

from proxy.formats.base import ModelRequest, ReplySummary, WireFormat
from proxy.formats.registry import FORMATS
from proxy.identity.call_memory import RESPONSE, CallMemory, provided_fingerprints
from proxy.identity.identify import CallIdentity, identify, retry_count
from proxy.routing import Route
from store.ids import new_id

RECORDING: Final = Path(__file__).with_name("recordings") / "stitching.json"
CLIENTS: Final = ("openai", "langchain", "agents", "autogen", "anthropic")
# Kinds of episodes, in a hundred of each client: with tools; runs that differ only in the ids of
# their tool calls; plain chat; a failed call that is retried; and runs with identical first turns,
# whose second and third call cannot be told from those of other runs.
KINDS: Final = {"tools": 40, "twins": 20, "chat": 29, "retried": 10, "alike": 1}
ALIKE_CALLS: Final = 2
# A number that stands for the episode's own in the recordings, and is nowhere else in them.
RECORDED_NUMBER: Final = "271828"
_IDS: Final = re.compile(r"(?:chatcmpl-tool-|chatcmpl-|resp_|msg_|rs_|fc_)[0-9a-f]{32}")


class Exchange(msgspec.Struct, frozen=True):
    """A recorded request and its reply."""

    dialect: str
    headers: dict[str, str]
    body: dict[str, Any]
    status: int
    reply: dict[str, Any]


class SeenCall(msgspec.Struct):
    """A replayed call as a proxy identified it; `run` is the run to which it really belongs."""

    run: int
    id: UUID
    who: CallIdentity
    seconds: float
    provides: tuple[bytes, ...] = ()


class Score(NamedTuple):
    """Counts of the calls that continue a run, by outcome.

    `joins` are all, `own` those that stayed alone, `false` those joined to another run.
    """

    joins: int
    right: int
    false: int
    quarantined: int
    own: int

    @property
    def share(self) -> float:
        """Return the share of `joins` that were made rightly."""
        return self.right / self.joins


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stitching", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recorded", action="store_true", help="replay the recordings (always)")
    options = parser.parse_args()
    plans = make_plans(options.episodes, options.seed)
    runs = recorded_runs(plans, options.seed)
    replayed = {proxies: replay(runs, proxies, options.seed) for proxies in (1, 3)}
    scores = {proxies: score(seen, join_in_ledger(seen)) for proxies, seen in replayed.items()}
    table = Table("", *(f"proxies: {proxies}" for proxies in scores))
    for name in (*Score._fields, "share"):
        table.add_row(name, *(f"{getattr(one, name):.6g}" for one in scores.values()))
    methods = Counter(call.who.method for call in replayed[1])
    identity_us = statistics.median(call.seconds for call in replayed[1]) * 1e6
    alike = ALIKE_CALLS * sum(kind == "alike" for _, kind in plans)
    console = Console()
    console.print(table)
    console.print(f"{len(replayed[1])} calls of {options.episodes} episodes, of which {alike}")
    console.print("continue a conversation that others began with identical words.")
    console.print(f"One proxy identified them by: {dict(sorted(methods.items()))}.")
    console.print(f"Identity took {identity_us:.1f} µs a call (median), request and reply.")


def make_plans(episodes: int, seed: int) -> list[tuple[str, str]]:
    """Return client and kind of each episode: equal numbers of clients, kinds as in `KINDS`."""
    random = Random(seed)
    decks: dict[str, list[str]] = {client: [] for client in CLIENTS}
    plans = []
    for number in range(episodes):
        client = CLIENTS[number % len(CLIENTS)]
        if not decks[client]:
            decks[client] = [kind for kind, count in KINDS.items() for _ in range(count)]
            random.shuffle(decks[client])
        plans.append((client, decks[client].pop()))
    return plans


def recorded_runs(plans: Iterable[tuple[str, str]], seed: int) -> list[list[Exchange]]:
    """Return each episode's exchanges, with new ids and a new number."""
    random = Random(f"recorded {seed}")
    recording = json.loads(RECORDING.read_text())
    runs = []
    for number, (client, kind) in enumerate(plans):
        text = json.dumps(recording[client]["runs"][kind])
        for old in sorted(set(_IDS.findall(text))):
            text = text.replace(old, f"{old[:-32]}{random.getrandbits(128):032x}")
        text = text.replace(RECORDED_NUMBER, str(number))
        runs.append(msgspec.json.decode(text, type=list[Exchange]))
    return runs


def replay(runs: Sequence[Sequence[Exchange]], proxies: int, seed: int) -> list[SeenCall]:
    """Replay all runs interleaved, each call at a random proxy; return the calls in their order."""
    random = Random(seed)
    memories = [CallMemory() for _ in range(proxies)]
    left = {run: list(exchanges) for run, exchanges in enumerate(runs)}
    connected: dict[int, CallMemory] = {}
    flying: dict[int, tuple[SeenCall, Exchange, bytes, CallMemory]] = {}
    seen: list[SeenCall] = []
    active = list(left)
    while active:
        place = random.randrange(len(active))
        run = active[place]
        if run in flying:
            _finish_call(*flying.pop(run))
            if not left[run]:
                active[place] = active[-1]
                active.pop()
            continue
        exchange = left[run].pop(0)
        # An SDK sends a retry over the same connection, so to the same proxy.
        if retry_count(exchange.headers) == 0:
            connected[run] = random.choice(memories)
        memory = connected[run]
        body = json.dumps(exchange.body).encode()
        request = ModelRequest(body, fields=exchange.body)
        route = Route(path="", wire_format=FORMATS[exchange.dialect])
        call = new_id()
        before = perf_counter()
        who = identify(exchange.headers, route, request, str(call), memory)
        seen.append(SeenCall(run, call, who, perf_counter() - before))
        flying[run] = (seen[-1], exchange, body, memory)
    return seen


def _finish_call(call: SeenCall, exchange: Exchange, body: bytes, memory: CallMemory) -> None:
    wire_format = FORMATS[exchange.dialect]
    summary = _summary(wire_format, exchange.reply)
    before = perf_counter()
    call.provides = provided_fingerprints(
        wire_format.turns, exchange.body, summary, call.who.conversation
    )
    memory.provide(call.provides, call.who.episode, call.who.follows)
    call.seconds += perf_counter() - before
    if exchange.status >= 400:
        memory.remember_failed(body, call.who.episode, call.id)


def _summary(wire_format: WireFormat, reply: dict[str, Any]) -> ReplySummary:
    if "error" in reply:
        return ReplySummary()
    parser = wire_format.reply_parser(ModelRequest(body=b""), None, streamed=False)
    parser.feed(json.dumps(reply).encode())
    parser.finish()
    return parser.summary()


def join_in_ledger(seen: Sequence[SeenCall]) -> list[tuple[str, bool]]:
    """Return each call's episode, and whether it is in doubt, once the ledger has all records.

    Of the fingerprints that a call needs, the surest one that other episodes provide counts. If one
    episode provides it, the call's episode is joined to that one; if several do, all of them are in
    doubt. This is repeated until no join is left, as one join may settle the doubt of another.
    """
    provided: dict[bytes, set[str]] = defaultdict(set)
    for call in seen:
        for digest in call.provides:
            provided[digest].add(call.who.episode)
    answers = {call.id: _matching_episodes(call, provided) for call in seen if call.who.needs}
    roots = {call.who.episode: call.who.episode for call in seen}

    def root(key: str) -> str:
        while roots[key] != key:
            roots[key] = key = roots[roots[key]]
        return key

    changed = True
    while changed:
        changed = False
        for call in seen:
            joined = {root(key) for key in answers.get(call.id, ())}
            own = root(call.who.episode)
            if len(joined) == 1 and own not in joined:
                roots[own] = joined.pop()
                changed = True
    doubted = {call.who.episode for call in seen if call.who.confidence == "doubtful"}
    for call in seen:
        answer = answers.get(call.id, set())
        if len({root(key) for key in answer}) > 1:
            doubted |= answer | {call.who.episode}
    in_doubt = {root(key) for key in doubted}
    ends = [root(call.who.episode) for call in seen]
    return [(key, key in in_doubt) for key in ends]


def _matching_episodes(call: SeenCall, provided: dict[bytes, set[str]]) -> set[str]:
    """Return the episodes that provide the surest needed fingerprint; ids of a kind are one."""
    levels: dict[int, set[str]] = defaultdict(set)
    for place, digest in enumerate(call.who.needs):
        level = digest[0] if digest[0] <= RESPONSE else RESPONSE + 1 + place
        levels[level] |= provided[digest] - {call.who.episode}
    return next((levels[level] for level in sorted(levels) if levels[level]), set())


def score(seen: Sequence[SeenCall], outcome: Sequence[tuple[str, bool]]) -> Score:
    """Count the calls by outcome; a doubtful call quarantines its whole episode."""
    doubted = {key for key, is_doubtful in outcome if is_doubtful}
    owner: dict[str, int] = {}
    first: dict[int, str] = {}
    counts: Counter[str] = Counter()
    for call, (key, _) in zip(seen, outcome, strict=True):
        is_wrong = owner.setdefault(key, call.run) != call.run
        counts["false"] += is_wrong and key not in doubted
        if call.run not in first:
            first[call.run] = key
            continue
        counts["joins"] += 1
        if key in doubted:
            counts["quarantined"] += 1
        elif not is_wrong:
            counts["right" if key == first[call.run] else "own"] += 1
    return Score(**{name: counts[name] for name in Score._fields})


if __name__ == "__main__":
    main()
