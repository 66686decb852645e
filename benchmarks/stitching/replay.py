"""Replay exchanges through identity as proxies and ledger do, and score what came of it."""

import json
from collections import defaultdict
from random import Random
from time import perf_counter
from typing import Any
from uuid import UUID

import msgspec

from benchmarks.stitching.server import Exchange
from proxy.formats.base import ModelRequest, ReplySummary, WireFormat
from proxy.formats.registry import FORMATS
from proxy.identity.call_memory import RESPONSE, CallMemory, provided_fingerprints
from proxy.identity.identify import Identity, identify, retry_count
from proxy.routing import Kind, Route
from store.ids import new_id


class Seen(msgspec.Struct):
    """Hold one call as its proxy recorded it; `run` is the truth."""

    run: int
    id: UUID
    who: Identity
    seconds: float
    provides: tuple[bytes, ...] = ()


def replay(runs: list[list[Exchange]], proxies: int, seed: int) -> list[Seen]:
    """Replay all runs at once, each call at a proxy drawn at random, in the order they arrived."""
    random = Random(seed)
    memories = [CallMemory() for _ in range(proxies)]
    left = {run: list(exchanges) for run, exchanges in enumerate(runs)}
    connected: dict[int, CallMemory] = {}
    flying: dict[int, tuple[Seen, Exchange, bytes, CallMemory]] = {}
    seen: list[Seen] = []
    active = list(left)
    while active:
        place = random.randrange(len(active))
        run = active[place]
        if run in flying:
            _finish(*flying.pop(run))
            if not left[run]:
                active[place] = active[-1]
                active.pop()
            continue
        exchange = left[run].pop(0)
        # An SDK sends its retry over the connection that it still has.
        if retry_count(exchange.headers) == 0:
            connected[run] = random.choice(memories)
        memory = connected[run]
        body = json.dumps(exchange.body).encode()
        request = ModelRequest(body, fields=exchange.body)
        route = Route(kind=Kind.CALL, path="", wire_format=FORMATS[exchange.dialect])
        call = new_id()
        before = perf_counter()
        who = identify(exchange.headers, route, request, str(call), memory)
        seen.append(Seen(run, call, who, perf_counter() - before))
        flying[run] = (seen[-1], exchange, body, memory)
    return seen


def _finish(call: Seen, exchange: Exchange, body: bytes, memory: CallMemory) -> None:
    wire_format = FORMATS[exchange.dialect]
    summary = summary_of(wire_format, exchange.reply)
    before = perf_counter()
    said = call.who.conversation
    call.provides = provided_fingerprints(wire_format.turns, exchange.body, summary, said)
    memory.provide(call.provides, call.who.episode, call.who.follows)
    call.seconds += perf_counter() - before
    if exchange.status >= 400:
        memory.failed(body, call.who.episode, call.id)


def summary_of(wire_format: WireFormat, reply: dict[str, Any]) -> ReplySummary:
    """Return what a whole reply said."""
    if "error" in reply:
        return ReplySummary()
    transcript = wire_format.reply(ModelRequest(body=b""), None, streamed=False)
    transcript.feed(json.dumps(reply).encode())
    transcript.finish()
    return transcript.summary()


def join_in_ledger(seen: list[Seen]) -> list[tuple[str, bool]]:
    """Return each call's episode, and whether it is in doubt, once the ledger knows all records.

    Of what a call needs, the surest fingerprint that other episodes provided counts. If they are
    one episode, the call's is that one, too; if not, all of them are in doubt. Joins are made
    until there are no more to be made, as one may settle the doubt of another.
    """
    provided: dict[bytes, set[str]] = defaultdict(set)
    for call in seen:
        for digest in call.provides:
            provided[digest].add(call.who.episode)
    answers = {call.id: _answer(call, provided) for call in seen if call.who.needs}
    roots = {call.who.episode: call.who.episode for call in seen}
    changed = True
    while changed:
        changed = False
        for call in seen:
            found = {_root(roots, key) for key in answers.get(call.id, ())}
            own = _root(roots, call.who.episode)
            if len(found) == 1 and own not in found:
                roots[own] = found.pop()
                changed = True
    doubted = {call.who.episode for call in seen if call.who.confidence == "doubtful"}
    for call in seen:
        answer = answers.get(call.id, set())
        if len({_root(roots, key) for key in answer}) > 1:
            doubted |= answer | {call.who.episode}
    roots_in_doubt = {_root(roots, key) for key in doubted}
    ends = [_root(roots, call.who.episode) for call in seen]
    return [(key, key in roots_in_doubt) for key in ends]


def _answer(call: Seen, provided: dict[bytes, set[str]]) -> set[str]:
    """Return the episodes that provide the surest fingerprint needed; a kind's ids are one."""
    found: dict[int, set[str]] = defaultdict(set)
    for place, digest in enumerate(call.who.needs):
        level = digest[0] if digest[0] <= RESPONSE else RESPONSE + 1 + place
        found[level] |= provided[digest] - {call.who.episode}
    return next((found[level] for level in sorted(found) if found[level]), set())


def _root(roots: dict[str, str], key: str) -> str:
    while roots[key] != key:
        roots[key] = key = roots[roots[key]]
    return key


class Score(msgspec.Struct, frozen=True):
    """Count what became of the calls that continue a run."""

    joins: int
    right: int
    false: int
    quarantined: int
    own: int

    @property
    def share(self) -> float:
        """Return the share of all calls to be joined that were, rightly."""
        return self.right / self.joins


def score(seen: list[Seen], outcome: list[tuple[str, bool]]) -> Score:
    """Score an episode with a doubtful call as quarantined whole, as it is trained whole."""
    doubted = {key for key, doubtful in outcome if doubtful}
    owner: dict[str, int] = {}
    first: dict[int, str] = {}
    counts = dict.fromkeys(("joins", "right", "false", "quarantined", "own"), 0)
    for call, (key, _) in zip(seen, outcome, strict=True):
        beginner = owner.setdefault(key, call.run)
        if call.run not in first:
            first[call.run] = key
            wrong = beginner != call.run
        else:
            counts["joins"] += 1
            wrong = beginner != call.run
            if key in doubted:
                counts["quarantined"] += 1
            elif not wrong:
                counts["right" if key == first[call.run] else "own"] += 1
        counts["false"] += wrong and key not in doubted
    return Score(**counts)
