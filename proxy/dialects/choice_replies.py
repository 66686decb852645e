"""Follows replies in `choices`: what leaves, what a later call may repeat, what was sampled.

A worker follows a reply only as far as serving needs (`feed`, `finish`, `gist`); the keeper
follows the same bytes again, `reading`, for all that the ledger wants (`facts`).
"""

import json
from typing import Any, Final

import msgspec

from proxy.dialects.base import (
    NULL,
    Gist,
    ModelRequest,
    Object,
    ReplyFacts,
    decoded_object,
    parse_object,
    readable_value,
)
from proxy.dialects.choice_words import ZERO, Gathering, string_or_none
from proxy.dialects.events import EventStream, Unread, is_done
from proxy.dialects.merge import merge_delta
from proxy.dialects.reread import reread
from proxy.dialects.undo import ODD_SHAPE, Undo
from store.records import ToolCall

DONE: Final = b"[DONE]"
EMPTY: Final = msgspec.Raw(b"{}")
READ: Final = ("id", "usage")
IN_PIECES: Final = ("delta", "text")
CHOICES: Final = ("choices",)
OF_CHOICE: Final = ("finish_reason", "message")
RIDERS: Final = ("finish_reason", "token_ids", "logprobs")

_encode: Final = msgspec.json.Encoder().encode


def _take_over(known: dict[str, Any], told: dict[str, Any], without: tuple[str, ...]) -> None:
    """What is told last stands, but for null."""
    for name, value in told.items():
        if name not in without and (value is not None or name not in known):
            known[name] = value


class WholeReply:
    """A reply that comes in one piece: nothing leaves before all of it is there."""

    def __init__(self, request: ModelRequest, served_name: str | None, *, reading: bool) -> None:
        self._undo = Undo(request, served_name, reading=reading)
        self._gathering = Gathering()
        self._pieces: list[bytes] = []
        self._parsed: Object | None = None
        self._choices: list[Object] = []
        self._out: bytes | None = None
        self.ended = False

    def feed(self, chunk: bytes) -> bytes:
        """Keep; see `Transcript`."""
        self._pieces.append(chunk)
        return b""

    def finish(self) -> bytes:
        """The restored reply; byte for byte the upstream's where nothing was added."""
        body = self._out = b"".join(self._pieces)
        self.ended = True
        parsed = parse_object(body)
        choices = None if parsed is None else self._undo.try_restore(parsed)
        if parsed is None or choices is None:
            self._out = self._undo.hide(body)
            return self._out
        self._parsed, self._choices = parsed, choices
        if self._undo.changed:
            self._out = _encode(parsed)
        if not choices:
            self._out = self._undo.hide(self._out)
        try:
            self._gathering.take(parsed, choices)
        except ODD_SHAPE:
            # Its gist is incomplete; the reply itself has not been touched.
            return self._out
        return self._out

    def gist(self) -> Gist:
        """See `Transcript`."""
        return self._gathering.gist()

    def facts(self) -> ReplyFacts:
        """See `Transcript`."""
        if self._parsed is None:
            reply = {} if self._out is None else decoded_object(self._out)
            return _facts(self._out if reply else None, reply or {}, self._undo, whole=self.ended)
        # What stands beside the words is small; the words themselves are not read again.
        head = {name: readable_value(self._parsed[name]) for name in READ if name in self._parsed}
        first = self._choices[0] if self._choices else {}
        choice = {name: readable_value(first[name]) for name in OF_CHOICE if name in first}
        read = head | {"choices": [choice]}
        return _facts(self._out, read, self._undo, whole=True)


def _facts(reply: bytes | None, parsed: dict[str, Any], undo: Undo, *, whole: bool) -> ReplyFacts:
    choices = parsed.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    first = first if isinstance(first, dict) else {}
    usage = parsed.get("usage") if isinstance(parsed.get("usage"), dict) else None
    return ReplyFacts(
        reply=reply,
        response_id=string_or_none(parsed.get("id")),
        finish=string_or_none(first.get("finish_reason")),
        usage=usage,
        tool_calls=_tool_calls(first.get("message")),
        sampled=undo.sampled(usage),
        whole=whole,
    )


def _tool_calls(message: Any) -> tuple[ToolCall, ...]:
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    found = []
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and call.get("id"):
            found.append(
                ToolCall(
                    id=str(call["id"]),
                    name=str(function.get("name") or ""),
                    arguments=str(function.get("arguments") or ""),
                )
            )
    return tuple(found)


class StreamedReply:
    """A reply as server-sent events, put together as it passes."""

    def __init__(
        self,
        request: ModelRequest,
        served_name: str | None,
        reply_object: str,
        *,
        reading: bool,
    ) -> None:
        self._undo = Undo(request, served_name, reading=reading)
        self._reply_object = reply_object
        self._reading = reading
        self._events = EventStream(self._data, self._undo.hide, is_done)
        self._gathering = Gathering()
        self._head: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self._finished: dict[bytes, bool] = {}
        self._unread = 0

    def feed(self, chunk: bytes) -> bytes:
        """See `Transcript`."""
        return self._events.feed(chunk)

    def reread(self, raw: bytes) -> None:
        """Take all there is, as `feed` does, where nothing of it leaves; of the facts, no gist."""
        self._events = EventStream(self._reread, self._undo.hide, is_done)
        self._events.feed(raw)

    @property
    def at_end(self) -> bool:
        """See `StreamTranscript`."""
        return self._events.at_end

    def release(self) -> bytes:
        """See `StreamTranscript`."""
        return self._events.release()

    def finish(self) -> bytes:
        """See `Transcript`."""
        return self._events.finish()

    @property
    def ended(self) -> bool:
        """Not every server sends [DONE]; a reason to finish in each choice says as much."""
        finished = bool(self._finished) and all(self._finished.values())
        return (self._events.ended or finished) and not (self._unread or self._events.unread)

    def gist(self) -> Gist:
        """See `Transcript`."""
        return self._gathering.gist()

    def _data(self, payload: bytes) -> bytes | None:
        if payload == DONE:
            return payload
        parsed = parse_object(payload)
        if parsed is None:
            raise Unread
        choices = self._undo.try_restore(parsed)
        if choices is None:
            self._unread += 1
            return self._undo.hide(payload)
        if self._undo.took and _rides_on_nothing(choices):
            return None
        out = _encode(parsed) if self._undo.changed else payload
        if not choices:
            # Usually it tells the usage; whatever else it is, it shows no ids.
            out = self._undo.hide(out)
        try:
            self._follow(parsed, choices, out)
        except ODD_SHAPE:
            self._unread += 1
        return out

    def _reread(self, payload: bytes) -> bytes:
        event = None if payload == DONE else reread(payload, self._undo)
        if event is None:
            self._data(payload)
            return payload
        for choice in event["choices"]:
            index = b"%d" % choice.get("index", 0)
            if choice.get("finish_reason") is not None or index not in self._finished:
                self._finished[index] = choice.get("finish_reason") is not None
        try:
            self._gather(event)
        except ODD_SHAPE:
            self._unread += 1
        return payload

    def _follow(self, parsed: Object, choices: list[Object], out: bytes) -> None:
        for choice in choices:
            index = bytes(choice.get("index", ZERO))
            reason = choice.get("finish_reason")
            self._finished[index] = (reason is not None and reason != NULL) or self._finished.get(
                index, False
            )
        self._gathering.take(parsed, choices)
        if self._reading:
            self._gather(_decoded(out))

    def _gather(self, event: dict[str, Any]) -> None:
        for choice in event.get("choices") or []:
            known = self._choices.setdefault(int(choice.get("index") or 0), {})
            if "delta" in choice:
                merge_delta(known.setdefault("message", {}), choice["delta"] or {})
            if "text" in choice:
                known["text"] = known.get("text", "") + choice["text"]
            _take_over(known, choice, IN_PIECES)
        _take_over(self._head, event, CHOICES)

    def facts(self) -> ReplyFacts:
        """See `Transcript`; the events put together into one `chat.completion`."""
        if not self._head and not self._choices:
            return _facts(None, {}, self._undo, whole=self._events.ended)
        choices = [self._choices[index] for index in sorted(self._choices)]
        reply = self._head | {"object": self._reply_object, "choices": choices}
        return _facts(_encode(reply), reply, self._undo, whole=self.ended)


def _decoded(payload: bytes) -> dict[str, Any]:
    """Return an event's values; a number past all bounds, as `1E400`, is infinite."""
    try:
        return msgspec.json.decode(payload, type=dict[str, Any])
    except msgspec.MsgspecError:
        told: dict[str, Any] = json.loads(payload)
        return told


def _rides_on_nothing(choices: list[Object]) -> bool:
    """Whether a chunk, now that what was added is out of it, says nothing at all.

    vLLM sends a delta that its parsers leave empty only for what rides on it: ids or
    log-probabilities that are asked for. What is still there was asked for by the client.
    """
    for choice in choices:
        if choice.get("delta") != EMPTY or any(choice.get(n, NULL) != NULL for n in RIDERS):
            return False
    return True
