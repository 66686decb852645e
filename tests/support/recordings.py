"""Replay recorded exchanges with a real vLLM (`tests/support/recorded`)."""

import json
import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from proxy.formats.base import ModelRequest, ReplyFacts, read_request
from proxy.formats.registry import FORMATS

FOLDER = Path(__file__).parent / "recorded"
SERVED = "calculator"
ASKED = "agent"
# What differs between any two answers to one request.
IDS = re.compile(rb'"((?:[a-z_]*_)?id|signature)":\s*"[^"]*"')
TIMES = re.compile(rb'"created_at":\s*\d+')
# How often a real server is asked for a stream again. One that is kept from a processor puts what
# two tokens add into one event.
TRIES = 20


def recordings(api: str) -> dict[str, dict[str, str]]:
    """Return every exchange of one API, by its name."""
    found: dict[str, dict[str, str]] = json.loads((FOLDER / f"{api}.json").read_text())
    return found


def normalised(body: bytes) -> bytes:
    """Remove what differs between any two answers."""
    return TIMES.sub(b'"created_at":0', IDS.sub(rb'"\1":"X"', body))


def cut_differently(one: bytes, other: bytes) -> bool:
    """Tell whether two streams have other numbers of events."""
    return one.count(b"data:") != other.count(b"data:")


def renamed(text: str) -> str:
    """Put the name that our client asks for in place of the served one."""
    return text.replace(f'"model":"{SERVED}"', f'"model":"{ASKED}"').replace(
        f'"model": "{SERVED}"', f'"model": "{ASKED}"'
    )


def asked(api: str, recording: dict[str, str]) -> ModelRequest:
    """Rewrite the request of a client that asks for `agent`, served as `calculator`."""
    request = read_request(renamed(recording["request"]).encode())
    return FORMATS[api].rewrite(request, SERVED, want_ids=True)


def cut(data: bytes, at: Iterable[int]) -> list[bytes]:
    """Cut `data` into pieces."""
    points = [0, *sorted(min(point, len(data)) for point in at), len(data)]
    return [data[a:b] for a, b in pairwise(points)]


def follow(api: str, request: ModelRequest, pieces: list[bytes]) -> tuple[bytes, ReplyFacts, Any]:
    """Return what the client sees of a reply in pieces, its facts and its summary."""
    spoken = FORMATS[api]
    reader = spoken.stream_reader if request.stream else spoken.whole_reader
    transcript: Any = reader(request, SERVED)
    out = b"".join(transcript.feed(piece) for piece in pieces) + transcript.finish()
    return out, transcript.facts(), transcript.summary()
