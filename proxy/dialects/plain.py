"""The dialects that give no ids: recorded as they were said, and marked not trainable.

`/v1/messages` (Anthropic's) and `/v1/responses`. Nothing is added to a request but the
version's name; in a reply the name is put back where it stands: on top, and in the
`message` or `response` that a stream's events carry.
"""

from collections.abc import Callable
from typing import Any, Final

import msgspec

from proxy.dialects.base import (
    Gist,
    ModelRequest,
    Object,
    ReplyFacts,
    Transcript,
    decoded_object,
    own_name,
    parse_object,
    with_changes,
)
from proxy.dialects.events import EventStream
from proxy.dialects.merge import merge_message_event
from proxy.trainable import NOTHING_SAMPLED
from store.records import ToolCall

ENVELOPES: Final = ("message", "response")
Reply = dict[str, Any]


class PlainDialect(msgspec.Struct, frozen=True):
    """One API without ids.

    `gather` adds one event to the reply that is being put together; `last_events` are the
    types that end a stream; `tool_calls` and `finish` read a whole reply.
    """

    name: str
    last_events: frozenset[str]
    gather: Callable[[Reply, dict[str, Any]], None]
    tool_calls: Callable[[Reply], tuple[ToolCall, ...]]
    finish: Callable[[Reply], Any]

    def rewrite(
        self, request: ModelRequest, served_name: str | None, *, want_ids: bool
    ) -> ModelRequest:
        """See `Dialect`; ids cannot be had."""
        return with_changes(request, served_name, {})

    def whole(
        self, request: ModelRequest, served_name: str | None, *, reading: bool = False
    ) -> Transcript:
        """See `Dialect`."""
        return PlainReply(self, own_name(request, served_name))

    def streamed(
        self, request: ModelRequest, served_name: str | None, *, reading: bool = False
    ) -> Transcript:
        """See `Dialect`."""
        return PlainStream(self, own_name(request, served_name))

    def facts(self, reply: Reply | None, *, whole: bool) -> ReplyFacts:
        """What a reply says; of one that has another shape than the API's, only that it came."""
        if reply is None:
            return ReplyFacts(None, None, None, None, (), NOTHING_SAMPLED, whole)
        usage, finish = reply.get("usage"), self.finish(reply)
        return ReplyFacts(
            reply=msgspec.json.encode(reply),
            response_id=reply["id"] if isinstance(reply.get("id"), str) else None,
            finish=finish if isinstance(finish, str) else None,
            usage=usage if isinstance(usage, dict) else None,
            tool_calls=self.tool_calls(reply),
            sampled=NOTHING_SAMPLED,
            whole=whole,
        )


def _gist(facts: ReplyFacts) -> Gist:
    return Gist(response_id=facts.response_id, tool_calls=facts.tool_calls)


def _restore(payload: bytes, model: msgspec.Raw | None) -> bytes:
    """The payload under the name the client asked for; the same object if nothing changes."""
    parsed = parse_object(payload) if model is not None else None
    if parsed is None or model is None:
        return payload
    changed = _rename(parsed, model)
    for name in ENVELOPES:
        inner = parse_object(bytes(parsed[name])) if name in parsed else None
        if inner is not None and _rename(inner, model):
            parsed[name] = msgspec.Raw(msgspec.json.encode(inner))
            changed = True
    return msgspec.json.encode(parsed) if changed else payload


def _rename(holder: Object, model: msgspec.Raw) -> bool:
    if "model" not in holder:
        return False
    holder["model"] = model
    return True


class PlainReply:
    """A reply in one piece."""

    def __init__(self, dialect: PlainDialect, model: msgspec.Raw | None) -> None:
        self._dialect = dialect
        self._model = model
        self._pieces: list[bytes] = []
        self._facts = dialect.facts(None, whole=False)

    def feed(self, chunk: bytes) -> bytes:
        """See `Transcript`."""
        self._pieces.append(chunk)
        return b""

    def finish(self) -> bytes:
        """See `Transcript`."""
        body = b"".join(self._pieces)
        out = _restore(body, self._model)
        self._facts = self._dialect.facts(decoded_object(out), whole=True)
        return out

    @property
    def ended(self) -> bool:
        """See `Transcript`."""
        return self._facts.whole

    def gist(self) -> Gist:
        """See `Transcript`."""
        return _gist(self._facts)

    def facts(self) -> ReplyFacts:
        """See `Transcript`."""
        return self._facts


class PlainStream:
    """A reply as events, each of which says its type."""

    def __init__(self, dialect: PlainDialect, model: msgspec.Raw | None) -> None:
        self._dialect = dialect
        self._model = model
        self._events = EventStream(self._data, self._is_end)
        self._reply: Reply = {}

    def feed(self, chunk: bytes) -> bytes:
        """See `Transcript`."""
        return self._events.feed(chunk)

    def finish(self) -> bytes:
        """See `Transcript`."""
        return self._events.finish()

    @property
    def ended(self) -> bool:
        """See `Transcript`."""
        return self._events.ended

    def gist(self) -> Gist:
        """See `Transcript`."""
        return _gist(self.facts())

    def facts(self) -> ReplyFacts:
        """See `Transcript`."""
        return self._dialect.facts(self._reply or None, whole=self._events.ended)

    def _is_end(self, line: bytes) -> bool:
        name, _, value = line.partition(b":")
        return name == b"event" and value.strip().decode(errors="replace") in (
            self._dialect.last_events
        )

    def _data(self, payload: bytes) -> bytes:
        out = _restore(payload, self._model)
        event = decoded_object(out)
        if event is not None:
            self._dialect.gather(self._reply, event)
        return out


def _gather_response(reply: Reply, event: dict[str, Any]) -> None:
    """The events of a response carry it whole at its beginning and at its end."""
    response = event.get("response")
    if isinstance(response, dict):
        reply.clear()
        reply |= response


def _items(reply: Reply, field: str, kind: str) -> list[dict[str, Any]]:
    found = reply.get(field)
    members = found if isinstance(found, list) else []
    return [m for m in members if isinstance(m, dict) and m.get("type") == kind]


def _response_tool_calls(reply: Reply) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(
            id=str(item.get("call_id")),
            name=str(item.get("name")),
            arguments=str(item.get("arguments")),
        )
        for item in _items(reply, "output", "function_call")
    )


def _message_tool_calls(reply: Reply) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(
            id=str(block.get("id")),
            name=str(block.get("name")),
            arguments=msgspec.json.encode(block.get("input")).decode(),
        )
        for block in _items(reply, "content", "tool_use")
    )


RESPONSES: Final = PlainDialect(
    name="responses",
    last_events=frozenset({"response.completed", "response.incomplete", "response.failed"}),
    gather=_gather_response,
    tool_calls=_response_tool_calls,
    finish=lambda reply: reply.get("status"),
)
MESSAGES: Final = PlainDialect(
    name="messages",
    last_events=frozenset({"message_stop"}),
    gather=merge_message_event,
    tool_calls=_message_tool_calls,
    finish=lambda reply: reply.get("stop_reason"),
)
