"""Follow responses, whole or streamed, as far as serving needs them (pure).

The keeper reads the same bytes again (`proxy.formats.responses.readers`).
"""

from typing import Any, Final

import msgspec

from proxy.formats.base import ModelRequest, Object, ReplySummary
from proxy.formats.requests import NULL, decoded_object, parse_object, value_of
from proxy.formats.responses.response_filter import EMPTY, ODD_SHAPE, ResponseFilter
from proxy.formats.sse import EventStream, Unread
from store.records import ToolCall

LAST_EVENTS: Final = frozenset({"response.completed", "response.incomplete", "response.failed"})


class WholeResponse:
    """Follow a response in one piece."""

    def __init__(self, request: ModelRequest, served_name: str | None) -> None:
        """Begin the reply to `request`."""
        self._filter = ResponseFilter(request, served_name)
        self._pieces: list[bytes] = []
        self._response: dict[str, Any] | None = None
        self._whole = False

    def feed(self, chunk: bytes) -> bytes:
        """Keep the bytes until the reply's end, and return none."""
        self._pieces.append(chunk)
        return b""

    def finish(self) -> bytes:
        """Return the restored reply, byte for byte the upstream's if nothing was added."""
        out = self._restored(b"".join(self._pieces))
        self._response, self._whole = decoded_object(out), True
        return out

    def _restored(self, body: bytes) -> bytes:
        parsed = parse_object(body)
        if parsed is None or parsed.keys().isdisjoint(("model", "output")):
            return self._filter.hide(body)
        try:
            self._filter.response(parsed)
        except ODD_SHAPE:
            return self._filter.hide(body)
        return body if self._filter.changes_nothing else msgspec.json.encode(parsed)

    @property
    def ended(self) -> bool:
        """Return whether the reply's end has come."""
        return self._whole

    def summary(self) -> ReplySummary:
        """Return the response's id, text and tool calls."""
        return _summary(self._response or {}, text_of(self._response or {}))


class StreamedResponse:
    """Follow a response's events; the first and the last carry the response itself."""

    def __init__(self, request: ModelRequest, served_name: str | None) -> None:
        """Begin the reply to `request`."""
        self._filter = ResponseFilter(request, served_name)
        self._events = EventStream(self._data, self._filter.hide, _is_end)
        self._response: dict[str, Any] | None = None
        self._deltas: list[str] = []
        self._unread = False

    def feed(self, chunk: bytes) -> bytes:
        """Return the restored lines that `chunk` completes, up to the event that ends the reply."""
        return self._events.feed(chunk)

    @property
    def at_end(self) -> bool:
        """Return whether the event that ends the reply has come whole."""
        return self._events.at_end

    def release(self) -> bytes:
        """Return the held back end of the stream."""
        return self._events.release()

    def finish(self) -> bytes:
        """Return the held back end of the stream, with any unfinished line."""
        return self._events.finish()

    @property
    def ended(self) -> bool:
        """Return whether the last event came and all events were readable."""
        return self._events.ended and not (self._unread or self._events.unread)

    def summary(self) -> ReplySummary:
        """Return the id, text and tool calls so far; tool calls only once the last event came."""
        return _summary(self._response or {}, "".join(self._deltas))

    def _data(self, payload: bytes) -> bytes:
        event = parse_object(payload)
        if event is None:
            raise Unread
        try:
            changed = self._read(event)
        except ODD_SHAPE:
            self._unread = True
            return self._filter.hide(payload)
        if not changed or self._filter.changes_nothing:
            return payload
        return msgspec.json.encode(event)

    def _read(self, event: Object) -> bool:
        """Restore an event in place; return whether it is of a type that may change."""
        kind = value_of(event.get("type"))
        if "response" in event:
            response = msgspec.json.decode(event["response"], type=Object)
            self._filter.response(response)
            event["response"] = msgspec.Raw(msgspec.json.encode(response))
            self._response = decoded_object(event["response"])
        elif kind == "response.output_text.delta":
            self._deltas.append(msgspec.json.decode(event["delta"], type=str))
            self._filter.text(event, EMPTY)
        elif kind == "response.content_part.done":
            part = msgspec.json.decode(event["part"], type=Object)
            self._filter.text(part, NULL)
            event["part"] = msgspec.Raw(msgspec.json.encode(part))
        elif kind == "response.output_item.done":
            item = msgspec.json.decode(event["item"], type=Object)
            self._filter.item(item)
            event["item"] = msgspec.Raw(msgspec.json.encode(item))
        else:
            return False
        return True


def _is_end(line: bytes) -> bool:
    name, _, value = line.partition(b":")
    return name == b"event" and value.strip().decode(errors="replace") in LAST_EVENTS


def _summary(response: dict[str, Any], text: str) -> ReplySummary:
    calls = tool_calls_of(response)
    return ReplySummary(response_id=string_of(response.get("id")), text=text, tool_calls=calls)


def string_of(value: object) -> str | None:
    """Return `value` if it is a string, else None."""
    return value if isinstance(value, str) else None


def _members(holder: dict[str, Any], field: str, kind: str) -> list[dict[str, Any]]:
    value = holder.get(field)
    members = value if isinstance(value, list) else []
    return [m for m in members if isinstance(m, dict) and m.get("type") == kind]


def text_of(response: dict[str, Any]) -> str:
    """Return what a response says, its items' texts one after another."""
    messages = _members(response, "output", "message")
    parts = (part for item in messages for part in _members(item, "content", "output_text"))
    return "".join(string_of(part.get("text")) or "" for part in parts)


def tool_calls_of(response: dict[str, Any]) -> tuple[ToolCall, ...]:
    """Return the tool executions that a response asks for."""
    return tuple(
        ToolCall(
            id=str(item.get("call_id")),
            name=str(item.get("name")),
            arguments=str(item.get("arguments")),
        )
        for item in _members(response, "output", "function_call")
    )
