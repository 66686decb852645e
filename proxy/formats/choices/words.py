"""Gather the words and tool calls of a reply in `choices` that a later call may repeat (pure)."""

from typing import Any, Final

import msgspec

from proxy.formats.base import ReplySummary
from proxy.formats.json_parts import Object, value_of
from store.records import ToolCall

ZERO: Final = msgspec.Raw(b"0")


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
