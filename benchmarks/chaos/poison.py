"""Lay down records that nobody can read or the database refuses, by a reply or on disk.

A call whose request has a mark gets a reply that is hard to keep. It is stored all the same, or
becomes a dead letter. A segment that lies in the spool holds what can only be a dead letter: a
frame of something else, or a record with one bit flipped, each between two that are whole.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import time
from typing import Final
from uuid import UUID

from benchmarks.proxy import wire
from proxy.spool.segments import HEAD_BYTES, CapturedCall, encode_frame, frame_of
from store.ids import new_id

# One call in so many gets such a reply, and as often such a segment is laid down.
EVERY: Final = 200
MARK: Final = "poison-"
DEPTH: Final = 2_000
_NESTED: Final = b'{"a":' * DEPTH + b"1" + b"}" * DEPTH
_TOOL: Final = (
    b'{"id":"r","object":"chat.completion.chunk","model":"m","choices":[{"index":0,"delta":'
    b'{"tool_calls":[{"index":0,"id":"call_1","function":{"name":"f","arguments":%b}}]},'
    b'"finish_reason":null}]}'
)
_WORDS: Final = (
    b'{"id":"%b","object":"chat.completion","model":"m","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"%b"},"finish_reason":"stop"}],"usage":null}'
)
# By the mark's second part: what the model server says then, in one piece or as an event.
REPLIES: Final[Mapping[str, bytes]] = {
    "nested": _TOOL % _NESTED,
    "nul": _WORDS % (b"nul\\u0000", b"x"),
    "bytes": _WORDS % (b"r", b"\xff\xfe"),
    "surrogate": _WORDS % (b"\\ud83d", b"\\udc00"),
    "number": _WORDS.replace(b"null", b'{"completion_tokens":1e400}') % (b"r", b"x"),
}
FOREIGN: Final = b"\x93\x01\x02"


def mark_of(number: int) -> str:
    """Return what the request of the call with this number begins with; empty for most."""
    if number % EVERY:
        return ""
    kinds = tuple(REPLIES)
    return f"{MARK}{kinds[number // EVERY % len(kinds)]} "


def reply_to(request: bytes) -> bytes | None:
    """Return the reply that a request's mark asks for, if it has one."""
    _, found, rest = request.partition(MARK.encode())
    return REPLIES[rest.partition(b" ")[0].decode()] if found else None


@dataclass(slots=True)
class Laid:
    """List what was laid into the spool: calls that must be stored, and poisoned segments."""

    whole: dict[str, str] = field(default_factory=dict)
    poisoned: list[str] = field(default_factory=list)


def lay(spool: Path, dice: random.Random, laid: Laid) -> None:
    """Put a sealed segment into the spool, in a folder of its own, as if a worker had left it.

    Raises:
        OSError: the disk takes nothing just now; nothing was laid.
    """
    name = str(new_id())
    folder = spool / f"laid-{name}"
    before, after = _call(), _call()
    bad = _foreign() if dice.random() < 0.5 else _flipped(encode_frame(_call()), dice)
    folder.mkdir()
    unfinished = folder / "unfinished"
    unfinished.write_bytes(encode_frame(before) + bad + encode_frame(after))
    unfinished.rename(folder / f"{name}.seg")
    laid.poisoned.append(name)
    for call in (before, after):
        laid.whole[str(UUID(bytes=call.id))] = call.episode


def _foreign() -> bytes:
    return frame_of(FOREIGN)


def _flipped(frame: bytes, dice: random.Random) -> bytes:
    at = dice.randrange(HEAD_BYTES, len(frame))
    return frame[:at] + bytes([frame[at] ^ 1 << dice.randrange(8)]) + frame[at + 1 :]


def _call() -> CapturedCall:
    episode = f"laid-{new_id()}"
    return CapturedCall(
        id=new_id().bytes,
        episode=episode,
        method="header",
        confidence="certain",
        agent="default",
        task=None,
        dialect="chat",
        policy="m",
        policy_version=0,
        served_model="m",
        wanted_ids=True,
        status="complete",
        http_status=200,
        streamed=False,
        request=wire.prompt(episode, 100).encode(),
        reply=wire.reply(20).encode(),
        deflated=False,
        provides=(),
        needs=(),
        retry_of=None,
        retry=0,
        tool_events=(),
        default_temperature=1.0,
        started_at=time(),
        first_chunk_ms=1.0,
        total_ms=2.0,
    )
