"""Read recorded replies in `choices` for all that the ledger stores of them (pure).

A reader follows a reply as the worker did, and gathers what it removes.
"""

import json
from typing import Any, Final

import msgspec

from proxy.formats.base import ModelRequest, ReplyFacts
from proxy.formats.choices.merge import merge_delta
from proxy.formats.choices.replies import DONE, StreamedReply, WholeReply
from proxy.formats.choices.reply_filter import ODD_SHAPE
from proxy.formats.choices.reread import reread
from proxy.formats.choices.token_reader import TokenReader
from proxy.formats.choices.words import string_or_none
from proxy.formats.json_parts import Object, decoded_object, readable_value
from proxy.formats.sse import EventStream, is_done
from store.records import ToolCall

READ: Final = ("id", "usage")
IN_PIECES: Final = ("delta", "text")
CHOICES: Final = ("choices",)
OF_CHOICE: Final = ("finish_reason", "message", "text")

_encode: Final = msgspec.json.Encoder().encode


class WholeReader(WholeReply):
    """Read a completion in one piece."""

    _filters = TokenReader
    _filter: TokenReader

    def read(self, raw: bytes) -> None:
        """Take the reply's bytes."""
        self.feed(raw)

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


class StreamReader(StreamedReply):
    """Read a completion's server-sent events, and merge them into one reply."""

    _filters = TokenReader
    _filter: TokenReader

    def __init__(self, request: ModelRequest, served_name: str | None, reply_object: str) -> None:
        """Begin the reply to `request`; `reply_object` is the type that the merged reply gets."""
        super().__init__(request, served_name)
        self._reply_object = reply_object
        self._head: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    def read(self, raw: bytes) -> None:
        """Read a recorded stream for its facts only: nothing leaves, and no summary is gathered."""
        self._events = EventStream(self._reread, self._filter.hide, is_done)
        self._events.feed(raw)

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
        super()._follow(parsed, choices, out)
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


def _facts(
    reply: bytes | None, parsed: dict[str, Any], filtered: TokenReader, *, whole: bool
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
        text=_text(first),
    )


def _text(choice: dict[str, Any]) -> str:
    message = choice.get("message")
    said = message.get("content") if isinstance(message, dict) else choice.get("text")
    return said if isinstance(said, str) else ""


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


def _take_over(known: dict[str, Any], event: dict[str, Any], without: tuple[str, ...]) -> None:
    """Copy the members of `event` but those in `without`; a null replaces nothing."""
    for name, value in event.items():
        if name not in without and (value is not None or name not in known):
            known[name] = value


def _decoded(payload: bytes) -> dict[str, Any]:
    """Return an event's values; a number beyond a float's range, as `1E400`, is infinite."""
    try:
        return msgspec.json.decode(payload, type=dict[str, Any])
    except msgspec.MsgspecError:
        event: dict[str, Any] = json.loads(payload)
        return event
