"""`/v1/responses`: ids through `enable_response_messages`, log-probabilities through `include`.

vLLM's additional values stand in `input_messages`, `output_messages`, `top_logprobs` and in each
text's `logprobs` (`vllm/entrypoints/openai/responses/protocol.py`). They are replaced by what vLLM
sends to clients that did not ask: `null`, and `[]` in a text's deltas.

vLLM gives log-probabilities for texts only. A whole reply with any text has those of all its
tokens; a reply of tool calls alone has none, and a stream lacks those of reasoning, of tool calls
and of the token that ends it. The counts then differ, and the call is not trainable.
"""

from typing import Any, Final

import msgspec

from proxy.formats.base import (
    NULL,
    ModelRequest,
    Object,
    ReplyFacts,
    ReplySummary,
    StreamTranscript,
    Transcript,
    decoded_object,
    parse_object,
    value_of,
    with_changes,
)
from proxy.formats.responses.response_filter import (
    EMPTY,
    IDS,
    INCLUDE,
    ODD_SHAPE,
    TOP,
    ResponseFilter,
)
from proxy.formats.sse import EventStream, Unread
from store.records import ToolCall

LOGPROBS: Final = "message.output_text.logprobs"
LAST_EVENTS: Final = frozenset({"response.completed", "response.incomplete", "response.failed"})


class ResponsesDialect(msgspec.Struct, frozen=True):
    """OpenAI's Responses API."""

    name: str = "responses"

    def rewrite(
        self, request: ModelRequest, served_name: str | None, *, want_ids: bool
    ) -> ModelRequest:
        """Return the request with the version's name and the fields that give ids.

        Nothing is added to a background request, which is answered before anything is sampled.
        """
        fields = request.fields
        included = fields.get(INCLUDE)
        added: Object = {}
        if want_ids and isinstance(included, list | None) and fields.get("background") is not True:
            if fields.get(IDS) is None or fields[IDS] is False:
                added[IDS] = msgspec.Raw(b"true")
            if LOGPROBS not in (included or ()):
                added[INCLUDE] = msgspec.Raw(msgspec.json.encode([*(included or ()), LOGPROBS]))
                # Without `include` the number of alternatives is ignored; with it, too large a
                # number would fail the call.
                if isinstance(fields.get(TOP), int) and fields[TOP] > 0:
                    added[TOP] = msgspec.Raw(b"0")
        return with_changes(request, served_name, added)

    def whole(
        self,
        request: ModelRequest,
        served_name: str | None,
        *,
        reading: bool = False,
        status: int | None = None,
    ) -> Transcript:
        """Return a transcript of a response in one piece."""
        return WholeResponse(request, served_name)

    def streamed(
        self, request: ModelRequest, served_name: str | None, *, reading: bool = False
    ) -> StreamTranscript:
        """Return a transcript of a response's events."""
        return StreamedResponse(request, served_name)


RESPONSES: Final = ResponsesDialect()


class WholeResponse:
    """A response in one piece."""

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

    def facts(self) -> ReplyFacts:
        """Return the response's facts."""
        return _facts(self._response, self._filter, whole=self._whole)

    def summary(self) -> ReplySummary:
        """Return the response's id, text and tool calls."""
        return _summary(self._response or {}, _text_of(self._response or {}))


class StreamedResponse:
    """A response's events; the first and the last carry the response itself."""

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

    def facts(self) -> ReplyFacts:
        """Return the facts of the response in the newest event that carries it."""
        return _facts(self._response, self._filter, whole=self.ended)

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


def _facts(response: dict[str, Any] | None, filtered: ResponseFilter, *, whole: bool) -> ReplyFacts:
    if response is None:
        return ReplyFacts(None, None, None, None, (), filtered.sampled(None), whole)
    usage = response.get("usage") if isinstance(response.get("usage"), dict) else None
    return ReplyFacts(
        reply=msgspec.json.encode(response),
        response_id=_string(response.get("id")),
        finish=_string(response.get("status")),
        usage=usage,
        tool_calls=_tool_calls(response),
        sampled=filtered.sampled(usage),
        whole=whole,
    )


def _summary(response: dict[str, Any], text: str) -> ReplySummary:
    calls = _tool_calls(response)
    return ReplySummary(response_id=_string(response.get("id")), text=text, tool_calls=calls)


def _string(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _members(holder: dict[str, Any], field: str, kind: str) -> list[dict[str, Any]]:
    value = holder.get(field)
    members = value if isinstance(value, list) else []
    return [m for m in members if isinstance(m, dict) and m.get("type") == kind]


def _text_of(response: dict[str, Any]) -> str:
    messages = _members(response, "output", "message")
    parts = (part for item in messages for part in _members(item, "content", "output_text"))
    return "".join(_string(part.get("text")) or "" for part in parts)


def _tool_calls(response: dict[str, Any]) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(
            id=str(item.get("call_id")),
            name=str(item.get("name")),
            arguments=str(item.get("arguments")),
        )
        for item in _members(response, "output", "function_call")
    )
