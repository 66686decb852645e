"""Messages that are forwarded as they are: recorded as they were said, and not trainable.

Nothing is added to a request but the version's name; in a reply the name is put back where
it stands: on top, and in the `message` that a stream's first event carries.
"""

from typing import Any, Final

import msgspec

from proxy.dialects.base import (
    Gist,
    ModelRequest,
    Object,
    ReplyFacts,
    StreamTranscript,
    Transcript,
    decoded_object,
    own_name,
    parse_object,
    with_changes,
)
from proxy.dialects.blind import Member, without
from proxy.dialects.events import EventStream, Unread
from proxy.dialects.merge import PARTIAL_INPUT, merge_message_event
from proxy.trainable import NOTHING_SAMPLED, Sampled
from store.records import ToolCall

ENVELOPE: Final = "message"
LAST_EVENT: Final = b"message_stop"
Message = dict[str, Any]


class PlainDialect(msgspec.Struct, frozen=True):
    """Anthropic's API at a server that gives no ids."""

    name: str = "messages"

    def rewrite(
        self, request: ModelRequest, served_name: str | None, *, want_ids: bool
    ) -> ModelRequest:
        """See `Dialect`; ids cannot be had."""
        return with_changes(request, served_name, {})

    def whole(
        self,
        request: ModelRequest,
        served_name: str | None,
        *,
        reading: bool = False,
        status: int | None = None,
    ) -> Transcript:
        """See `Dialect`."""
        return PlainReply(Renaming(request, served_name))

    def streamed(
        self, request: ModelRequest, served_name: str | None, *, reading: bool = False
    ) -> StreamTranscript:
        """See `Dialect`."""
        return PlainStream(Renaming(request, served_name))


MESSAGES: Final = PlainDialect()


def message_facts(message: Message | None, sampled: Sampled, *, whole: bool) -> ReplyFacts:
    """What a message says; of one that has another shape than the API's, only that it came."""
    if message is None:
        return ReplyFacts(None, None, None, None, (), sampled, whole)
    usage = message.get("usage")
    return ReplyFacts(
        reply=msgspec.json.encode(message),
        response_id=_text(message.get("id")),
        finish=_text(message.get("stop_reason")),
        usage=usage if isinstance(usage, dict) else None,
        tool_calls=_tool_calls(message),
        sampled=sampled,
        whole=whole,
    )


def message_gist(message: Message) -> Gist:
    """What a message said so far; a tool's block counts once it is whole."""
    texts = (_text(block.get("text")) or "" for block in _blocks(message, "text"))
    return Gist(
        response_id=_text(message.get("id")), text="".join(texts), tool_calls=_tool_calls(message)
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _blocks(message: Message, kind: str) -> list[dict[str, Any]]:
    found = message.get("content")
    members = found if isinstance(found, list) else []
    return [m for m in members if isinstance(m, dict) and m.get("type") == kind]


def _tool_calls(message: Message) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(
            id=str(block.get("id")),
            name=str(block.get("name")),
            arguments=msgspec.json.encode(block.get("input")).decode(),
        )
        for block in _blocks(message, "tool_use")
        if PARTIAL_INPUT not in block
    )


class Renaming:
    """Puts back the name that the client asked for, where the version's stands."""

    def __init__(self, request: ModelRequest, served_name: str | None) -> None:
        self._model = own_name(request, served_name)
        self._members: dict[bytes, Member] = {}
        if self._model is not None:
            served = msgspec.json.encode(served_name)
            self._members[b"model"] = Member(opens=b'"', instead=bytes(self._model), only=served)

    def restore(self, payload: bytes) -> bytes:
        """Return the payload under that name; the same object if nothing changes."""
        model = self._model
        if model is None:
            return payload
        parsed = parse_object(payload)
        if parsed is None:
            return self.hide(payload)
        changed = _rename(parsed, model)
        inner = parse_object(bytes(parsed[ENVELOPE])) if ENVELOPE in parsed else None
        if inner is not None and _rename(inner, model):
            parsed[ENVELOPE] = msgspec.Raw(msgspec.json.encode(inner))
            changed = True
        return msgspec.json.encode(parsed) if changed else payload

    def hide(self, payload: bytes) -> bytes:
        """Return what is no JSON object under that name."""
        return without(payload, self._members)


def _rename(holder: Object, model: msgspec.Raw) -> bool:
    if "model" not in holder:
        return False
    holder["model"] = model
    return True


class PlainReply:
    """A reply in one piece."""

    def __init__(self, renaming: Renaming) -> None:
        self._renaming = renaming
        self._pieces: list[bytes] = []
        self._message: Message | None = None
        self._whole = False

    def feed(self, chunk: bytes) -> bytes:
        """See `Transcript`."""
        self._pieces.append(chunk)
        return b""

    def finish(self) -> bytes:
        """See `Transcript`."""
        out = self._renaming.restore(b"".join(self._pieces))
        self._message, self._whole = decoded_object(out), True
        return out

    @property
    def ended(self) -> bool:
        """See `Transcript`."""
        return self._whole

    def facts(self) -> ReplyFacts:
        """See `Transcript`."""
        return message_facts(self._message, NOTHING_SAMPLED, whole=self._whole)

    def gist(self) -> Gist:
        """See `Transcript`."""
        return message_gist(self._message or {})


class PlainStream:
    """A reply as events, each of which says its type."""

    def __init__(self, renaming: Renaming) -> None:
        self._renaming = renaming
        self._events = EventStream(self._data, renaming.hide, _is_end)
        self._message: Message = {}

    def feed(self, chunk: bytes) -> bytes:
        """See `Transcript`."""
        return self._events.feed(chunk)

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
        """See `Transcript`."""
        return self._events.ended

    def facts(self) -> ReplyFacts:
        """See `Transcript`."""
        return message_facts(self._message or None, NOTHING_SAMPLED, whole=self._events.ended)

    def gist(self) -> Gist:
        """See `Transcript`."""
        return message_gist(self._message)

    def _data(self, payload: bytes) -> bytes:
        out = self._renaming.restore(payload)
        event = decoded_object(out)
        if event is None:
            raise Unread
        merge_message_event(self._message, event)
        return out


def _is_end(line: bytes) -> bool:
    name, _, value = line.partition(b":")
    return name == b"event" and value.strip() == LAST_EVENT
