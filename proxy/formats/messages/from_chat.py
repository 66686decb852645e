"""Make messages of chat completions, whole or as events, as far as serving needs them (pure).

The keeper reads the same bytes again (`proxy.formats.messages.readers`).
"""

from typing import Any, Final

import msgspec

from proxy.formats.base import ModelRequest, ReplySummary
from proxy.formats.choices.chat_reply import ChatReply, read_repaired, read_reply
from proxy.formats.choices.replies import DONE
from proxy.formats.choices.reply_filter import ReplyFilter
from proxy.formats.messages.errors import ANTHROPIC, ERRORS
from proxy.formats.messages.merge import merge_message_event
from proxy.formats.messages.message_events import Event, MessageEvents, encode_event, whole_message
from proxy.formats.messages.plain import message_summary
from proxy.formats.requests import decoded_object, own_name, value_of
from proxy.formats.sse import BOM, Lines, is_done

UNREADABLE: Final = "The model server sent data that is not a chunk of a chat completion."


class WholeMessage:
    """Make a message of a chat completion in one piece, or of the error in its place."""

    def __init__(
        self, request: ModelRequest, served_name: str | None, *, status: int | None = None
    ) -> None:
        """Begin the reply to `request`, which comes with this HTTP `status`."""
        self._model = _asked_model(request, served_name)
        self._filter = ReplyFilter(request, served_name)
        self._status = status
        self._pieces: list[bytes] = []
        self._message: dict[str, Any] | None = None
        self._whole = False

    def feed(self, chunk: bytes) -> bytes:
        """Keep the bytes until the reply's end, and return none."""
        self._pieces.append(chunk)
        return b""

    def finish(self) -> bytes:
        """Return the message, or the error in Anthropic's format.

        A reply that is neither is returned as it came, without ids.
        """
        body = b"".join(self._pieces)
        out = _translated(self._read(body), self._model) or _translated_error(body, self._status)
        if out is None:
            out = _translated(read_repaired(body), self._model) or self._filter.hide(body)
        self._message, self._whole = decoded_object(out), True
        return out

    def _read(self, body: bytes) -> ChatReply | None:
        return read_reply(body)

    @property
    def ended(self) -> bool:
        """Return whether the reply's end has come."""
        return self._whole

    def summary(self) -> ReplySummary:
        """Return the message's text and tool calls."""
        return message_summary(self._message or {})


class StreamedMessage:
    """Make a message's events of a chat completion's chunks, as they come."""

    def __init__(self, request: ModelRequest, served_name: str | None) -> None:
        """Begin the reply to `request`."""
        self._events = MessageEvents(_asked_model(request, served_name))
        self._message: dict[str, Any] = {}
        self._lines = Lines()
        # Data that is not a chunk by itself; it may be the first line of several.
        self._parts: list[bytes] = []
        self._held = b""
        self._ended = False
        self._failed = False

    def feed(self, chunk: bytes) -> bytes:
        """Return the events of the lines that `chunk` completes."""
        return b"".join([self._line(line) for line in self._lines.feed(chunk)])

    @property
    def at_end(self) -> bool:
        """Return whether `[DONE]` has come."""
        return self._ended

    def release(self) -> bytes:
        """Return the last events, which were held back."""
        held, self._held = self._held, b""
        return held

    def finish(self) -> bytes:
        """Return the last events; an unfinished line is ignored unless it is `[DONE]`."""
        rest = self._lines.rest()
        if is_done(rest):
            self._line(rest)
        return self.release()

    def _line(self, line: bytes) -> bytes:
        line = line.removeprefix(BOM)
        if line.startswith(b":"):
            return line.rstrip(b"\r\n") + b"\n\n"
        if self._ended or self._failed:
            return b""
        if not line.startswith(b"data:"):
            return self._rest_of_event() if self._parts and not line.strip() else b""
        payload = line[5:].strip()
        if payload == DONE:
            self._ended = True
            self._held = self._say(self._events.stop())
            return b""
        chunk = None if self._parts else read_reply(payload)
        if chunk is None:
            self._parts.append(payload)
            return b""
        return self._chunk(chunk, payload)

    def _rest_of_event(self) -> bytes:
        payload, self._parts = b"\n".join(self._parts), []
        return self._chunk(read_reply(payload), payload)

    def _chunk(self, chunk: ChatReply | None, payload: bytes) -> bytes:
        if chunk is None or chunk.choices is None:
            self._failed = True
            return _error_event(decoded_object(payload) or {})
        return self._say(self._events.take(chunk))

    def _say(self, events: list[Event]) -> bytes:
        for event in events:
            merge_message_event(self._message, event)
        return b"".join(encode_event(event) for event in events)

    @property
    def ended(self) -> bool:
        """Return whether `[DONE]` came."""
        return self._ended

    def summary(self) -> ReplySummary:
        """Return the message's text and tool calls so far."""
        return message_summary(self._message)


def _translated(reply: ChatReply | None, model: str | None) -> bytes | None:
    if reply is None or not reply.choices or reply.choices[0].message is None:
        return None
    return msgspec.json.encode(whole_message(reply, reply.choices[0], model or reply.model))


def _asked_model(request: ModelRequest, served_name: str | None) -> str | None:
    name = value_of(own_name(request, served_name))
    return name if isinstance(name, str) else None


def _translated_error(body: bytes, status: int | None) -> bytes | None:
    """Return vLLM's error in Anthropic's format, with the type of its status there."""
    error = _error_of(decoded_object(body) or {})
    if error is None:
        return None
    if status not in ERRORS:
        status = error.status
    return ANTHROPIC.body(error.message, error.kind, status=status)


def _error_event(payload: dict[str, Any]) -> bytes:
    error = _error_of(payload) or _Error(UNREADABLE, "", None)
    return ANTHROPIC.event(error.message, error.kind, status=error.status)


class _Error(msgspec.Struct, frozen=True):
    message: str
    kind: str
    status: int | None


def _error_of(payload: dict[str, Any]) -> _Error | None:
    """Return the error in a reply, in OpenAI's format or in that of vLLM before 0.10."""
    error = payload.get("error")
    if not isinstance(error, dict):
        error = payload if payload.get("object") == "error" else {}
    message, kind, code = error.get("message"), error.get("type"), error.get("code")
    if not isinstance(message, str):
        return None
    # vLLM's code is the HTTP status, OpenAI's is a word.
    return _Error(message, str(kind), code if type(code) is int else None)
