"""Replay exchanges with a real vLLM (`tests/support/recorded`), and make some up."""

import json
import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from proxy.formats.base import ModelRequest, ReplyFacts, ReplySummary, read_request
from proxy.formats.registry import FORMATS

FOLDER = Path(__file__).parent / "recorded"
SERVED = "calculator"
ASKED = "agent"
# A version of the policy `agent`, of which made-up requests ask something plain.
VERSION = "agent@3"
SAID = {"messages": [{"role": "user", "content": "q"}]}
PLAIN: dict[str, dict[str, Any]] = {
    "chat": {"model": ASKED, **SAID},
    "completions": {"model": ASKED, "prompt": "q"},
    "responses": {"model": ASKED, "input": "q"},
    "messages": {"model": ASKED, "max_tokens": 9, **SAID},
}
DONE = b"data: [DONE]\n\n"
# What differs between any two answers to one request.
IDS = re.compile(rb'"((?:[a-z_]*_)?id|signature)":\s*"[^"]*"')
TIMES = re.compile(rb'"created_at":\s*\d+')
# How often a real server is asked for a stream again. One that is kept from a processor puts what
# two tokens add into one event.
TRIES = 20


def recordings(api: str) -> dict[str, dict[str, str]]:
    """Return every exchange of one API, by its name."""
    exchanges: dict[str, dict[str, str]] = json.loads((FOLDER / f"{api}.json").read_text())
    return exchanges


def normalised(body: bytes) -> bytes:
    """Remove what differs between any two answers."""
    return TIMES.sub(b'"created_at":0', IDS.sub(rb'"\1":"X"', body))


def renamed(text: str) -> str:
    """Put the name that our client asks for in place of the served one."""
    return text.replace(f'"model":"{SERVED}"', f'"model":"{ASKED}"').replace(
        f'"model": "{SERVED}"', f'"model": "{ASKED}"'
    )


def asked(api: str, recording: dict[str, str]) -> ModelRequest:
    """Rewrite the request of a client that asks for `agent`, served as `calculator`."""
    request = read_request(renamed(recording["request"]).encode())
    return FORMATS[api].rewrite(request, SERVED, want_ids=True)


def rewritten(api: str, *, want_ids: bool = True, **fields: Any) -> ModelRequest:
    """Rewrite a plain request, with these fields besides, for version 3 of `agent`."""
    request = read_request(json.dumps(PLAIN[api] | fields).encode())
    return FORMATS[api].rewrite(request, VERSION, want_ids=want_ids)


def chunk(
    delta: Any, tokens: Mapping[int, float] = MappingProxyType({}), **choice: Any
) -> dict[str, Any]:
    """Make an event of a chat completion, with the log-probability of each id sampled in it."""
    content = [{"token": "t", "logprob": logprob} for logprob in tokens.values()]
    made: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": None}
    made |= {"logprobs": {"content": content}, "token_ids": list(tokens)} if tokens else {}
    return {"id": "r1", "model": VERSION, "choices": [made | choice]}


def sse(*events: Any) -> bytes:
    """Write events as servers send them: compact, and named where they have a type."""
    return b"".join(
        (b"event: %b\n" % event["type"].encode() if "type" in event else b"")
        + b"data: %b\n\n" % json.dumps(event, separators=(",", ":"), ensure_ascii=False).encode()
        for event in events
    )


def cut(data: bytes, at: Iterable[int]) -> list[bytes]:
    """Cut `data` into pieces."""
    points = [0, *sorted(min(point, len(data)) for point in at), len(data)]
    return [data[a:b] for a, b in pairwise(points)]


class Followed(NamedTuple):
    """What the client sees of a reply, what is stored of it, and what a later call may repeat."""

    seen: bytes
    facts: ReplyFacts
    summary: ReplySummary
    ended: bool


def follow(
    name: str,
    request: ModelRequest,
    pieces: Iterable[bytes],
    served: str | None = SERVED,
    *,
    streamed: bool | None = None,
    status: int | None = None,
) -> Followed:
    """Follow a reply as a worker does, and read it as the ingester does."""
    is_stream = request.stream if streamed is None else streamed
    spoken = FORMATS[name]
    worker = spoken.reply_parser(request, served, streamed=is_stream, status=status)
    reader = spoken.reply_parser(request, served, streamed=is_stream, status=status, reading=True)
    pieces = list(pieces)
    seen = b"".join([*map(worker.feed, pieces), worker.finish()])
    assert reader.feed(b"".join(pieces)) + reader.finish() == b""
    return Followed(seen, reader.facts(), worker.summary(), worker.ended)
