"""Read recorded replies in `choices` for all that the ledger stores of them (pure).

A reader follows a reply as the worker did, gathers what it removes, and merges a stream's chunks
into one reply. To pass an event on, its values are kept as bytes, taken apart level by level and
put together again. The keeper only needs their contents: for an event of the usual shape one
untyped parse gives these, and one typed parse gives its ids. Any other event is read as the worker
reads it.
"""

import json
from typing import Any, Final

import msgspec

from proxy.formats.base import ModelRequest, Object, ReplyFacts
from proxy.formats.choices.replies import DONE, Said, StreamedReply, WholeReply, string_or_none
from proxy.formats.choices.reply_filter import ODD_SHAPE, Id, Logprobs, TokenReader
from proxy.formats.requests import decoded_object, readable_value
from proxy.formats.sse import EventStream, is_done
from store.records import ToolCall
from store.values.json_limits import nests_too_deep

READ: Final = ("id", "usage")
IN_PIECES: Final = ("delta", "text")
CHOICES: Final = ("choices",)
OF_CHOICE: Final = ("finish_reason", "message", "text")

_encode: Final = msgspec.json.Encoder().encode
# These strings come whole; all others come in pieces.
WHOLE_STRINGS: Final = frozenset({"role", "id", "type", "name"})


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
    content = message.get("content") if isinstance(message, dict) else choice.get("text")
    return content if isinstance(content, str) else ""


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


class _Choice(msgspec.Struct, gc=False):
    index: int = 0
    delta: Said | msgspec.UnsetType = msgspec.UNSET
    text: str | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[Id] | None = None
    token_ids: list[Id] | None = None
    logprobs: Logprobs | None = None


class _Event(msgspec.Struct, gc=False):
    choices: list[_Choice]
    prompt_token_ids: list[Id] | None = None


_event: Final = msgspec.json.Decoder(dict[str, Any])
_typed: Final = msgspec.json.Decoder(_Event)


def reread(payload: bytes, filtered: TokenReader) -> dict[str, Any] | None:
    """Return the event as the client saw it, and add what is removed from it to `filtered`.

    Return None for an event that is not of the usual shape; then nothing is added.
    """
    if nests_too_deep(payload):
        return None
    try:
        event, typed = _event.decode(payload), _typed.decode(payload)
    except ODD_SHAPE:
        return None
    if not event["choices"] or not all(map(_is_usual, event["choices"])):
        return None
    if filtered.model is not None and "model" in event:
        event["model"] = filtered.model
    _take_prompt(event, typed.prompt_token_ids, filtered)
    for choice, read in zip(event["choices"], typed.choices, strict=True):
        _take_choice(choice, read, filtered)
    return event


def _is_usual(choice: dict[str, Any]) -> bool:
    """Return whether a choice has a non-empty delta or text, and a whole number as index.

    An event with an empty delta may have been dropped.
    """
    says = choice.get("delta", "text" in choice)
    return bool(says) and "message" not in choice and type(choice.get("index", 0)) is int


def _take_prompt(holder: dict[str, Any], ids: list[int] | None, filtered: TokenReader) -> None:
    if ids is not None:
        filtered.prompt_ids = ids
        if filtered.hide_ids:
            holder["prompt_token_ids"] = None


def _take_choice(choice: dict[str, Any], read: _Choice, filtered: TokenReader) -> None:
    filtered.indices.add(read.index)
    _take_prompt(choice, read.prompt_token_ids, filtered)
    if read.token_ids is not None:
        filtered.took_ids(read.token_ids)
        if filtered.hide_ids:
            choice["token_ids"] = None
    if read.logprobs is not None:
        filtered.took_logprobs(read.logprobs)
        if filtered.hide_logprobs:
            choice["logprobs"] = None


def merge_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add one delta to `message`, in place.

    Strings are appended, lists whose members have an `index` are merged by it, and anything else is
    replaced.
    """
    for name, value in delta.items():
        known = message.get(name)
        if value is None:
            message.setdefault(name, None)
        elif isinstance(value, str) and isinstance(known, str) and name not in WHOLE_STRINGS:
            message[name] = known + value
        elif isinstance(value, dict) and isinstance(known, dict):
            merge_delta(known, value)
        elif isinstance(value, list) and all(_indexed(member) for member in value):
            message[name] = _merge_indexed(known or [], value)
        else:
            message[name] = value


def _indexed(member: object) -> bool:
    return isinstance(member, dict) and isinstance(member.get("index"), int)


def _merge_indexed(
    known: list[dict[str, Any]], pieces: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    by_index = {member["index"]: member for member in known}
    for piece in pieces:
        merge_delta(by_index.setdefault(piece["index"], {}), piece)
    return [by_index[index] for index in sorted(by_index)]
