"""Forward Anthropic's messages to a server as they are: recorded, and not trainable.

Nothing but the version's name is added to a request. In a reply the client's name for the model is
put back at the top level, and in the `message` of a stream's first event.
"""

from typing import Any, Final

import msgspec

from proxy.formats.base import (
    NOTHING_SAMPLED,
    ModelRequest,
    Object,
    ReplyFacts,
    ReplySummary,
    Sampled,
)
from proxy.formats.messages.merge import PARTIAL_INPUT, merge_message_event
from proxy.formats.requests import decoded_object, own_name, parse_object
from proxy.formats.sse import EventStream, Unread
from proxy.formats.unparsed import JsonMember, without
from store.records import ToolCall

ENVELOPE: Final = "message"
LAST_EVENT: Final = b"message_stop"
Message = dict[str, Any]


def message_facts(
    message: Message | None, sampled: Sampled, *, whole: bool, too_deep: bool = False
) -> ReplyFacts:
    """Return the facts of a message, which is None if the reply could not be read as one."""
    if message is None:
        return ReplyFacts(None, None, None, None, (), sampled, whole, too_deep)
    usage = message.get("usage")
    return ReplyFacts(
        reply=msgspec.json.encode(message),
        response_id=_text(message.get("id")),
        finish=_text(message.get("stop_reason")),
        usage=usage if isinstance(usage, dict) else None,
        tool_calls=_tool_calls(message),
        sampled=sampled,
        whole=whole,
        too_deep=too_deep,
        text=_words(message),
    )


def message_summary(message: Message) -> ReplySummary:
    """Return what was said so far; a tool's block counts once it is whole."""
    return ReplySummary(
        response_id=_text(message.get("id")), text=_words(message), tool_calls=_tool_calls(message)
    )


def _words(message: Message) -> str:
    return "".join(_text(block.get("text")) or "" for block in _blocks(message, "text"))


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _blocks(message: Message, kind: str) -> list[dict[str, Any]]:
    content = message.get("content")
    members = content if isinstance(content, list) else []
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
    """Put the client's name for the model back in place of the version's."""

    def __init__(self, request: ModelRequest, served_name: str | None) -> None:
        """Begin with the client's name from `request`, and the version's name."""
        self._model = own_name(request, served_name)
        self._members: dict[bytes, JsonMember] = {}
        if self._model is not None:
            served = msgspec.json.encode(served_name)
            self._members[b"model"] = JsonMember(
                opens=b'"', instead=bytes(self._model), only=served
            )

    def restore(self, payload: bytes) -> bytes:
        """Return the payload with the client's name; the same object if nothing changes."""
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
        """Return a payload that cannot be parsed with the version's name replaced."""
        return without(payload, self._members)


def _rename(holder: Object, model: msgspec.Raw) -> bool:
    if "model" not in holder:
        return False
    holder["model"] = model
    return True


class PlainReply:
    """Follow a message in one piece."""

    def __init__(self, renaming: Renaming) -> None:
        """Begin a reply in which `renaming` puts the model's name back."""
        self._renaming = renaming
        self._pieces: list[bytes] = []
        self._message: Message | None = None
        self._whole = False

    def feed(self, chunk: bytes) -> bytes:
        """Keep the bytes until the reply's end, and return none."""
        self._pieces.append(chunk)
        return b""

    def finish(self) -> bytes:
        """Return the whole reply with the client's name for the model."""
        out = self._renaming.restore(b"".join(self._pieces))
        self._message, self._whole = decoded_object(out), True
        return out

    @property
    def ended(self) -> bool:
        """Return whether the reply's end has come."""
        return self._whole

    def summary(self) -> ReplySummary:
        """Return the message's text and tool calls."""
        return message_summary(self._message or {})


class PlainReader(PlainReply):
    """Read a recorded message in one piece."""

    def read(self, raw: bytes) -> None:
        """Take the reply's bytes."""
        self.feed(raw)

    def facts(self) -> ReplyFacts:
        """Return the message's facts, without token ids."""
        return message_facts(self._message, NOTHING_SAMPLED, whole=self._whole)


class PlainStream:
    """Follow a message as server-sent events, each of which names its type."""

    def __init__(self, renaming: Renaming) -> None:
        """Begin a stream in which `renaming` puts the model's name back."""
        self._renaming = renaming
        self._events = EventStream(self._data, renaming.hide, _is_end)
        self._message: Message = {}

    def feed(self, chunk: bytes) -> bytes:
        """Return the lines that `chunk` completes, up to the event `message_stop`."""
        return self._events.feed(chunk)

    @property
    def at_end(self) -> bool:
        """Return whether the event `message_stop` has come whole."""
        return self._events.at_end

    def release(self) -> bytes:
        """Return the held back end of the stream."""
        return self._events.release()

    def finish(self) -> bytes:
        """Return the held back end of the stream, with any unfinished line."""
        return self._events.finish()

    @property
    def ended(self) -> bool:
        """Return whether `message_stop` came."""
        return self._events.ended

    def summary(self) -> ReplySummary:
        """Return the message's text and tool calls so far."""
        return message_summary(self._message)

    def _data(self, payload: bytes) -> bytes:
        out = self._renaming.restore(payload)
        event = decoded_object(out)
        if event is None:
            raise Unread
        merge_message_event(self._message, event)
        return out


class PlainStreamReader(PlainStream):
    """Read the recorded events of a message."""

    def read(self, raw: bytes) -> None:
        """Take the reply's bytes."""
        self.feed(raw)

    def facts(self) -> ReplyFacts:
        """Return the facts of the message that the events make, without token ids."""
        return message_facts(self._message or None, NOTHING_SAMPLED, whole=self._events.ended)


def _is_end(line: bytes) -> bool:
    name, _, value = line.partition(b":")
    return name == b"event" and value.strip() == LAST_EVENT
