"""Replays exchanges through identity as proxies and ledger do, and scores what came of it."""

import json
from collections import defaultdict
from random import Random
from time import perf_counter
from typing import Any
from uuid import UUID

import msgspec

from benchmarks.stitching_server import Exchange
from proxy.dialects.base import Gist
from proxy.identity import Identity, identify
from proxy.routes import Kind, Route
from proxy.signs import attempt_of, offers_of
from proxy.stitch import Stitches
from store.ids import new_id
from store.records import ToolCall


class Seen(msgspec.Struct):
    """One call as its proxy recorded it; `run` is the truth."""

    run: int
    id: UUID
    who: Identity
    seconds: float
    offers: tuple[bytes, ...] = ()


def replay(runs: list[list[Exchange]], proxies: int, seed: int) -> list[Seen]:
    """All runs at once, each call at a proxy drawn at random, in the order they arrived."""
    random = Random(seed)
    memories = [Stitches() for _ in range(proxies)]
    left = {run: list(exchanges) for run, exchanges in enumerate(runs)}
    flying: dict[int, tuple[Seen, Exchange, bytes, Stitches]] = {}
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
        exchange, memory = left[run].pop(0), random.choice(memories)
        body = json.dumps(exchange.body).encode()
        route = Route(kind=Kind.CALL, path="", dialect=exchange.dialect)
        call = new_id()
        before = perf_counter()
        who = identify(exchange.headers, route, exchange.body, body, call, memory)
        seen.append(Seen(run, call, who, perf_counter() - before))
        flying[run] = (seen[-1], exchange, body, memory)
    return seen


def _finish(call: Seen, exchange: Exchange, body: bytes, memory: Stitches) -> None:
    gist = gist_of(exchange.dialect, exchange.reply)
    before = perf_counter()
    said = call.who.conversation
    call.offers = offers_of(exchange.dialect, exchange.body, gist, said)
    memory.offer(call.offers, call.who.episode)
    call.seconds += perf_counter() - before
    if exchange.status >= 400:
        memory.failed(body, call.who.episode, call.id)
        call.offers += (attempt_of(body),)


def gist_of(dialect: str, reply: dict[str, Any]) -> Gist:
    """What a whole reply said."""
    if "error" in reply:
        return Gist()
    if dialect == "chat":
        message = reply["choices"][0]["message"]
        calls = [
            (call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in message["tool_calls"]
        ]
        text = message["content"] or ""
    elif dialect == "responses":
        items = reply["output"]
        parts = [part for item in items if item["type"] == "message" for part in item["content"]]
        text = "".join(part["text"] for part in parts)
        calls = [
            (item["call_id"], item["name"], item["arguments"])
            for item in items
            if item["type"] == "function_call"
        ]
    else:
        text = "".join(block["text"] for block in reply["content"] if block["type"] == "text")
        calls = [
            (block["id"], block["name"], json.dumps(block["input"]))
            for block in reply["content"]
            if block["type"] == "tool_use"
        ]
    told = tuple(ToolCall(id=id_, name=name, arguments=text_) for id_, name, text_ in calls)
    return Gist(reply["id"], text, told)


def join_in_ledger(seen: list[Seen]) -> list[tuple[str, bool]]:
    """Each call's episode, and whether it is in doubt, once the ledger knows all records.

    By the proxies' own rule: the surest offer that any earlier call made decides, and offers
    of several episodes none. A prefix that a proxy joined by is looked at again.
    """
    offered: dict[bytes, list[Seen]] = defaultdict(list)
    episodes: dict[UUID, str] = {}
    result = []
    moved: dict[str, str] = {}
    for call in seen:
        key = moved.get(call.who.episode, call.who.episode)
        doubtful = call.who.confidence == "doubtful"
        for digest in call.who.asks:
            owners = {episodes[other.id] for other in offered[digest] if other.id < call.id}
            if len(owners) == 1 and call.who.method in ("own", "trace"):
                key = moved[call.who.episode] = owners.pop()
                doubtful = False
                break
            if owners:
                doubtful = owners != {key}
                break
        episodes[call.id] = key
        result.append((key, doubtful))
        for digest in call.offers:
            offered[digest].append(call)
    return result


class Score(msgspec.Struct, frozen=True):
    """What became of the calls that continue a run."""

    joins: int
    right: int
    false: int
    quarantined: int
    own: int

    @property
    def share(self) -> float:
        """Of all calls to be joined, those that were, rightly."""
        return self.right / self.joins


def score(seen: list[Seen], outcome: list[tuple[str, bool]]) -> Score:
    """An episode with a doubtful call is quarantined whole, as it is trained whole."""
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


def as_recorded(seen: list[Seen]) -> list[tuple[str, bool]]:
    """What the proxies made of the calls, with no ledger behind them."""
    return [(call.who.episode, call.who.confidence == "doubtful") for call in seen]
