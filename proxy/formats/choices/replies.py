"""Follow replies in `choices`, whole or streamed, as far as serving needs them (pure).

That is: what leaves, when the reply has ended, and the words and tool calls that a later call may
repeat.
The keeper reads the same bytes again (`proxy.formats.choices.readers`).
"""

from typing import Any, Final

import msgspec

from proxy.formats.base import ModelRequest, Object, ReplySummary
from proxy.formats.choices.reply_filter import ODD_SHAPE, ReplyFilter
from proxy.formats.requests import NULL, parse_object, value_of
from proxy.formats.sse import EventStream, Unread, is_done
from store.records import ToolCall

DONE: Final = b"[DONE]"
EMPTY: Final = msgspec.Raw(b"{}")
RIDERS: Final = ("finish_reason", "token_ids", "logprobs")

_encode: Final = msgspec.json.Encoder().encode
ZERO: Final = msgspec.Raw(b"0")


class WholeReply:
    """Follow a completion in one piece, of which nothing leaves before all of it has come."""

    _filters: type[ReplyFilter] = ReplyFilter

    def __init__(self, request: ModelRequest, served_name: str | None) -> None:
        """Begin the reply to `request`."""
        self._filter = self._filters(request, served_name)
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
        return self._out

    def summary(self) -> ReplySummary:
        """Return the first choice's text and tool calls, as far as they can be read."""
        gathering = Gathering()
        if self._parsed is not None:
            try:
                gathering.take(self._parsed, self._choices)
            except ODD_SHAPE:
                # What was gathered before it counts.
                return gathering.summary()
        return gathering.summary()


class StreamedReply:
    """Follow a completion's server-sent events, and restore them one by one as they pass."""

    _filters: type[ReplyFilter] = ReplyFilter

    def __init__(self, request: ModelRequest, served_name: str | None) -> None:
        """Begin the reply to `request`."""
        self._filter = self._filters(request, served_name)
        self._events = EventStream(self._data, self._filter.hide, is_done)
        self._gathering = Gathering()
        self._finished: dict[bytes, bool] = {}
        self._unread = 0

    def feed(self, chunk: bytes) -> bytes:
        """Return the restored lines that `chunk` completes, up to the one that ends the reply."""
        return self._events.feed(chunk)

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

    def _follow(self, parsed: Object, choices: list[Object], out: bytes) -> None:
        for choice in choices:
            index = bytes(choice.get("index", ZERO))
            reason = choice.get("finish_reason")
            self._finished[index] = (reason is not None and reason != NULL) or self._finished.get(
                index, False
            )
        self._gathering.take(parsed, choices)


def is_ids_only(choices: list[Object]) -> bool:
    """Return whether a chunk is empty now that what was added is removed.

    vLLM sends a chunk with an empty delta only to carry ids or log-probabilities that were asked
    for. Whatever is still in it was asked for by the client.
    """
    for choice in choices:
        if choice.get("delta") != EMPTY or any(choice.get(n, NULL) != NULL for n in RIDERS):
            return False
    return True


class _Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class _ToolPiece(msgspec.Struct, gc=False):
    index: int = 0
    id: str | None = None
    function: _Function | None = None


class Said(msgspec.Struct):
    """Hold the fields of a message or a delta that a later call repeats."""

    content: Any = None
    tool_calls: list[_ToolPiece] | None = None


_said: Final = msgspec.json.Decoder(Said)
_text: Final = msgspec.json.Decoder(str)


class Gathering:
    """Gather the first choice's words and tool calls, piece by piece."""

    def __init__(self) -> None:
        """Begin with nothing gathered."""
        self.response_id: str | None = None
        self._words: list[str] = []
        self._tools: dict[int, list[str]] = {}

    def take(self, parsed: Object, choices: list[Object]) -> None:
        """Add one event, or a whole reply."""
        if self.response_id is None and "id" in parsed:
            self.response_id = string_or_none(value_of(parsed["id"]))
        if not choices or choices[0].get("index", ZERO) != ZERO:
            return
        first = choices[0]
        if (raw := first.get("delta") or first.get("message")) is not None:
            self._take_message(_said.decode(raw))
        elif (raw := first.get("text")) is not None:
            self._words.append(_text.decode(raw))

    def _take_message(self, message: Said) -> None:
        if isinstance(message.content, str):
            self._words.append(message.content)
        for position, piece in enumerate(message.tool_calls or ()):
            # A whole message's calls have no index of their own.
            index = piece.index or position
            known = self._tools.setdefault(index, ["", "", ""])
            function = piece.function or _Function()
            known[0] = piece.id or known[0]
            known[1] = function.name or known[1]
            known[2] += function.arguments or ""

    def summary(self) -> ReplySummary:
        """Return what was gathered so far."""
        calls = [self._tools[index] for index in sorted(self._tools)]
        return ReplySummary(
            response_id=self.response_id,
            text="".join(self._words),
            tool_calls=tuple(ToolCall(id=i, name=n, arguments=a) for i, n, a in calls),
        )


def string_or_none(value: Any) -> str | None:
    """Return `value` if it is a string, else None."""
    return value if isinstance(value, str) else None
