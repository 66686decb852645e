"""Transcripts of replies in `choices`, whole or streamed.

A worker follows a reply only as far as serving needs (`feed`, `finish`, `summary`). The keeper
follows the same bytes again, with `reading`, for all that the ledger stores (`facts`).
"""

import json
from typing import Any, Final

import msgspec

from proxy.formats.base import (
    NULL,
    ModelRequest,
    Object,
    ReplyFacts,
    ReplySummary,
    decoded_object,
    parse_object,
    readable_value,
)
from proxy.formats.choices.reply_filter import ODD_SHAPE, ReplyFilter
from proxy.formats.choices.words import ZERO, Gathering, string_or_none
from proxy.formats.merge import merge_delta
from proxy.formats.reread import reread
from proxy.formats.sse import EventStream, Unread, is_done
from store.records import ToolCall

DONE: Final = b"[DONE]"
EMPTY: Final = msgspec.Raw(b"{}")
READ: Final = ("id", "usage")
IN_PIECES: Final = ("delta", "text")
CHOICES: Final = ("choices",)
OF_CHOICE: Final = ("finish_reason", "message")
RIDERS: Final = ("finish_reason", "token_ids", "logprobs")

_encode: Final = msgspec.json.Encoder().encode


def _take_over(known: dict[str, Any], event: dict[str, Any], without: tuple[str, ...]) -> None:
    """Copy the members of `event` but those in `without`; a null replaces nothing."""
    for name, value in event.items():
        if name not in without and (value is not None or name not in known):
            known[name] = value


class WholeReply:
    """A completion in one piece, of which nothing leaves before all of it has come."""

    def __init__(self, request: ModelRequest, served_name: str | None, *, reading: bool) -> None:
        """Begin the reply to `request`."""
        self._filter = ReplyFilter(request, served_name, reading=reading)
        self._gathering = Gathering()
        self._pieces: list[bytes] = []
        self._parsed: Object | None = None
        self._choices: list[Object] = []
        self._out: bytes | None = None
        self.ended = False

    def feed(self, chunk: bytes) -> bytes:
        """Keep the bytes until the reply's end, and return none."""
        self._pieces.append(chunk)
        return b""

    def finish(self) -> bytes:
        """Return the restored reply, byte for byte the upstream's if nothing was added."""
        body = self._out = b"".join(self._pieces)
        self.ended = True
        parsed = parse_object(body)
        choices = None if parsed is None else self._filter.try_restore(parsed)
        if parsed is None or choices is None:
            self._out = self._filter.hide(body)
            return self._out
        self._parsed, self._choices = parsed, choices
        if self._filter.changed:
            self._out = _encode(parsed)
        if not choices:
            self._out = self._filter.hide(self._out)
        try:
            self._gathering.take(parsed, choices)
        except ODD_SHAPE:
            # The summary is incomplete, but the reply itself is not affected.
            return self._out
        return self._out

    def summary(self) -> ReplySummary:
        """Return the first choice's text and tool calls."""
        return self._gathering.summary()

    def facts(self) -> ReplyFacts:
        """Return the facts of the first choice, and of the reply if it could be read."""
        if self._parsed is None:
            reply = {} if self._out is None else decoded_object(self._out)
            return _facts(self._out if reply else None, reply or {}, self._filter, whole=self.ended)
        # Only the few fields that the facts need are decoded, not the log-probabilities.
        head = {name: readable_value(self._parsed[name]) for name in READ if name in self._parsed}
        first = self._choices[0] if self._choices else {}
        choice = {name: readable_value(first[name]) for name in OF_CHOICE if name in first}
        read = head | {"choices": [choice]}
        return _facts(self._out, read, self._filter, whole=True)


def _facts(
    reply: bytes | None, parsed: dict[str, Any], filtered: ReplyFilter, *, whole: bool
) -> ReplyFacts:
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
        sampled=filtered.sampled(usage),
        whole=whole,
    )


def _tool_calls(message: Any) -> tuple[ToolCall, ...]:
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    tool_calls = []
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and call.get("id"):
            tool_calls.append(
                ToolCall(
                    id=str(call["id"]),
                    name=str(function.get("name") or ""),
                    arguments=str(function.get("arguments") or ""),
                )
            )
    return tuple(tool_calls)


class StreamedReply:
    """A completion's server-sent events, merged into one reply as they pass."""

    def __init__(
        self,
        request: ModelRequest,
        served_name: str | None,
        reply_object: str,
        *,
        reading: bool,
    ) -> None:
        """Begin the reply to `request`; `reply_object` is the type that the merged reply gets."""
        self._filter = ReplyFilter(request, served_name, reading=reading)
        self._reply_object = reply_object
        self._reading = reading
        self._events = EventStream(self._data, self._filter.hide, is_done)
        self._gathering = Gathering()
        self._head: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self._finished: dict[bytes, bool] = {}
        self._unread = 0

    def feed(self, chunk: bytes) -> bytes:
        """Return the restored lines that `chunk` completes, up to the one that ends the reply."""
        return self._events.feed(chunk)

    def reread(self, raw: bytes) -> None:
        """Read a recorded stream for its facts only: nothing leaves, and no summary is gathered."""
        self._events = EventStream(self._reread, self._filter.hide, is_done)
        self._events.feed(raw)

    @property
    def at_end(self) -> bool:
        """Return whether `[DONE]` has come."""
        return self._events.at_end

    def release(self) -> bytes:
        """Return the held back end of the stream."""
        return self._events.release()

    def finish(self) -> bytes:
        """Return the held back end of the stream, with any unfinished line."""
        return self._events.finish()

    @property
    def ended(self) -> bool:
        """Return whether `[DONE]` or each choice's reason to finish came, and all was readable.

        Not every server sends `[DONE]`.
        """
        finished = bool(self._finished) and all(self._finished.values())
        return (self._events.ended or finished) and not (self._unread or self._events.unread)

    def summary(self) -> ReplySummary:
        """Return the first choice's text and tool calls so far."""
        return self._gathering.summary()

    def _data(self, payload: bytes) -> bytes | None:
        if payload == DONE:
            return payload
        parsed = parse_object(payload)
        if parsed is None:
            raise Unread
        choices = self._filter.try_restore(parsed)
        if choices is None:
            self._unread += 1
            return self._filter.hide(payload)
        if self._filter.took and is_ids_only(choices):
            return None
        out = _encode(parsed) if self._filter.changed else payload
        if not choices:
            # Such an event usually holds the usage. Whatever it is, it must show no ids.
            out = self._filter.hide(out)
        try:
            self._follow(parsed, choices, out)
        except ODD_SHAPE:
            self._unread += 1
        return out

    def _reread(self, payload: bytes) -> bytes:
        event = None if payload == DONE else reread(payload, self._filter)
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
        """Return the facts of the events, merged into one object of the type `reply_object`."""
        if not self._head and not self._choices:
            return _facts(None, {}, self._filter, whole=self._events.ended)
        choices = [self._choices[index] for index in sorted(self._choices)]
        reply = self._head | {"object": self._reply_object, "choices": choices}
        return _facts(_encode(reply), reply, self._filter, whole=self.ended)


def _decoded(payload: bytes) -> dict[str, Any]:
    """Return an event's values; a number beyond a float's range, as `1E400`, is infinite."""
    try:
        return msgspec.json.decode(payload, type=dict[str, Any])
    except msgspec.MsgspecError:
        event: dict[str, Any] = json.loads(payload)
        return event


def is_ids_only(choices: list[Object]) -> bool:
    """Return whether a chunk is empty now that what was added is removed.

    vLLM sends a chunk with an empty delta only to carry ids or log-probabilities that were asked
    for. Whatever is still in it was asked for by the client.
    """
    for choice in choices:
        if choice.get("delta") != EMPTY or any(choice.get(n, NULL) != NULL for n in RIDERS):
            return False
    return True
