"""Extract the messages of a call, whatever its wire format (pure).

A request repeats its conversation from the beginning, so only what it adds to the previous request
is shown. The three APIs with turns have message formats of their own that do not contradict each
other: one walk reads them all, and shows unknown parts as JSON.
"""

from collections.abc import Iterator, Sequence
from itertools import islice, takewhile
from typing import Any, Final, Literal, NamedTuple

import msgspec

from proxy.formats.conversation import TOOL_ROLES, objects
from proxy.formats.raw_json import UNREADABLE, Object, decoded_object, parse_object, readable_value
from store.read.detail import CallTexts
from store.records import Record
from store.values.documents import nests_too_deep

# Parts shown of one message.
MOST_PARTS: Final = 200
# Messages shown of a reply (its first ones), and of those added by a request (half of them its
# first ones, half its last ones).
MOST_MESSAGES: Final = 40
# The fields for instructions beside the messages, by API.
_INSTRUCTIONS: Final = ("system", "instructions")

Kind = Literal["text", "thought", "call", "result", "media", "other", "more"]
# By the type of a part or an item; "" if there is none.
_KINDS: Final[dict[str, Kind]] = {
    **dict.fromkeys(("", "text", "input_text", "output_text", "summary_text", "refusal"), "text"),
    **dict.fromkeys(("thinking", "reasoning", "reasoning_text", "redacted_thinking"), "thought"),
    **dict.fromkeys(("function", "custom", "function_call", "custom_tool_call"), "call"),
    **dict.fromkeys(("tool_use", "server_tool_use"), "call"),
    **dict.fromkeys(("tool_result", "function_call_output", "custom_tool_call_output"), "result"),
}
_MEDIA: Final = ("image", "audio", "file", "video", "document", "input_image", "input_file")
# The fields with a part's text, by kind, and the fields with its tool call's id.
_TEXTS: Final[dict[Kind, tuple[str, ...]]] = {
    "text": ("text", "refusal"),
    "thought": ("thinking", "text", "data", "summary", "content"),
    "call": ("arguments", "input"),
    "result": ("output", "content"),
}
_TOOL_IDS: Final = ("tool_call_id", "tool_use_id", "call_id", "id")
# An object without a type is a message if it has one of these fields.
_MESSAGE: Final = frozenset(
    {"content", "reasoning_content", "reasoning", "refusal", "tool_calls", "function_call"}
)


class Part(Record, frozen=True, kw_only=True):
    """A piece of a message; `title` is a tool's name, or a type."""

    kind: Kind
    text: str
    title: str = ""
    tool_id: str | None = None


NOT_SHOWN_PART: Final = Part(kind="more", text="", title="what follows is not shown")


class Message(Record, frozen=True, kw_only=True):
    role: str
    parts: tuple[Part, ...]


class Turn(NamedTuple):
    """A call's reply, and the messages that its request adds to the previous one.

    `messages` is None if the request cannot be parsed. The request repeats `same` messages of the
    previous one and drops `left_out`: the agent shortened or changed its history. If it sends the
    previous reply back unchanged (`repeats_reply`), `messages` leaves that reply out. `more` counts
    added messages that are not shown.
    """

    reply: tuple[Message, ...]
    messages: tuple[Message, ...] | None = None
    same: int = 0
    left_out: int = 0
    repeats_reply: bool = False
    more: int = 0


NO_TEXTS: Final = CallTexts(None, None)


def turn_of(own: CallTexts, before: CallTexts = NO_TEXTS) -> Turn:
    """Return a call's reply, and the messages that its request adds to that of `before`."""
    reply = reply_in(own.reply)
    fields, base = _parse_fields(own.request), _parse_fields(before.request) or {}
    if fields is None:
        return Turn(reply)
    members, known = _raw_messages(fields), _raw_messages(base)
    pairs = zip(members, known, strict=False)
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    new = members[same:]
    half = MOST_MESSAGES // 2
    shown = new if len(new) <= MOST_MESSAGES else [*new[:half], *new[-half:]]
    instructions = [
        message_of(readable_value(fields[name]), "system")
        for name in _INSTRUCTIONS
        if name in fields and fields[name] != base.get(name)
    ]
    messages = [message_of(readable_value(raw), "user") for raw in shown]
    answers = list(takewhile(lambda message: message.role == "assistant", messages))
    repeated = _comparable_parts(answers)
    repeats_reply = bool(repeated) and repeated == _comparable_parts(reply_in(before.reply))
    return Turn(
        reply=reply,
        messages=(*instructions, *messages[len(answers) if repeats_reply else 0 :]),
        same=same,
        left_out=len(known) - same,
        repeats_reply=repeats_reply,
        more=len(new) - len(shown),
    )


def question_in(turn: Turn) -> str:
    """Return the text of the last user message with a text that a turn adds, or ""."""
    asked = [_message_text(one) for one in turn.messages or () if one.role == "user"]
    return next(filter(None, reversed(asked)), "")


def answer_in(turn: Turn) -> str:
    """Return the text of a turn's reply, or its tool calls if it has none."""
    texts = "\n".join(map(_message_text, turn.reply)).strip()
    parts = [part for message in turn.reply for part in message.parts]
    return texts or "\n".join(
        f"{part.title} {part.text}" for part in parts if part.kind != "thought"
    )


def _message_text(message: Message) -> str:
    """Return the texts of a message, joined; thoughts and tool calls are left out."""
    return "\n".join(part.text for part in message.parts if part.kind == "text").strip()


def _parse_fields(body: bytes | None) -> Object | None:
    return None if body is None or nests_too_deep(body) else parse_object(body)


def _raw_messages(fields: Object) -> list[msgspec.Raw]:
    """Return the messages of a request, unparsed; a format without turns has one prompt."""
    for name in ("messages", "input"):
        if name in fields:
            return _as_list(fields[name])
    return [fields["prompt"]] if "prompt" in fields else []


def _as_list(raw: msgspec.Raw) -> list[msgspec.Raw]:
    """Return the members of a list, or any other value as the only member."""
    try:
        return msgspec.json.decode(raw, type=list[msgspec.Raw] | None) or []
    except UNREADABLE:
        return [raw]


def _comparable_parts(messages: Sequence[Message]) -> list[tuple[str, str, str]]:
    """Return the parts of a reply that stay the same when its agent sends it back."""
    return [
        (part.kind, part.title, part.text.strip())
        for message in messages
        for part in message.parts
        if part.kind in ("text", "call")
    ]


def reply_in(body: bytes | None) -> tuple[Message, ...]:
    """Return the messages of a reply in any format; an unknown body is one message of its text."""
    if body is None:
        return ()
    reply = decoded_object(body) or {}
    members = [
        choice.get("message", choice.get("text")) for choice in objects(reply.get("choices"))
    ]
    members = members or list(objects(reply.get("output")))
    if not members and "content" in reply and "error" not in reply:
        members = [reply]
    if not members:
        role = "error" if "error" in reply else "reply"
        text = body.decode(errors="replace")
        return (Message(role=role, parts=(Part(kind="other", text=text),)),)
    messages = tuple(message_of(member, "assistant") for member in members[:MOST_MESSAGES])
    is_cut = len(members) > MOST_MESSAGES
    return (*messages, Message(role="reply", parts=(NOT_SHOWN_PART,))) if is_cut else messages


def message_of(member: Any, role: str) -> Message:
    """Convert a request's or reply's message or item; `role` is used if it names no role."""
    if isinstance(member, dict):
        kind, named = member.get("type"), member.get("role")
        if isinstance(named, str):
            role = named[:40]
        elif isinstance(kind, str):
            role = "tool" if _KINDS.get(kind) == "result" else "assistant"
    return Message(role=role, parts=_first_parts(_parts(member)))


def _first_parts(parts: Iterator[Part]) -> tuple[Part, ...]:
    """Return the first `MOST_PARTS` parts; if there are more, a last one says so."""
    kept = tuple(islice(parts, MOST_PARTS))
    return kept if next(parts, None) is None else (*kept, NOT_SHOWN_PART)


def _parts(value: Any) -> Iterator[Part]:
    """Yield the parts of a message, of a message's content, or of an item (Responses API)."""
    if isinstance(value, str):
        yield Part(kind="text", text=value)
    elif isinstance(value, list) and all(isinstance(member, dict) for member in value):
        for member in value:
            yield from _parts(member)
    elif not isinstance(value, dict):
        if value is not None:
            yield Part(kind="other", text=_json(value))
    elif value.get("role") in TOOL_ROLES:
        yield _part_of(value | {"type": "tool_result"})
    elif value.get("type") in (None, "message") and not _MESSAGE.isdisjoint(value):
        thought = value.get("reasoning_content") or value.get("reasoning")
        if isinstance(thought, str):
            yield Part(kind="thought", text=thought)
        yield from _parts(value.get("content"))
        if isinstance(value.get("refusal"), str):
            yield _part_of({"type": "refusal", "refusal": value["refusal"]})
        for call in (*objects(value.get("tool_calls")), *objects([value.get("function_call")])):
            yield _part_of({"type": "function"} | call)
    else:
        yield _part_of(value)


def _part_of(part: dict[str, Any]) -> Part:
    """Return the part that an object describes; an unknown type is shown as JSON."""
    named = part.get("type")
    name = named[:200] if isinstance(named, str) else ""
    kind = _KINDS.get(name, "other")
    nested = part.get(name)
    if kind == "call" and isinstance(nested, dict):
        part = part | nested
    texts = [part[field] for field in _TEXTS.get(kind, ()) if part.get(field) is not None]
    if kind == "other" or (kind == "text" and not texts):
        text = _json(part)
        if not name.startswith(_MEDIA):
            return Part(kind="other", text=text, title=name)
        shown = text if len(text) < 300 else f"{len(text):,} characters"
        return Part(kind="media", text=shown, title=name)
    title = name if name == "refusal" else part.get("name")
    if part.get("is_error") is True:
        title = "error"
    ids = (part.get(field) for field in _TOOL_IDS)
    return Part(
        kind=kind,
        text="\n".join(_text_of(text, is_json=kind == "call") for text in texts),
        title=title[:200] if isinstance(title, str) else "",
        tool_id=next((given for given in ids if isinstance(given, str)), None),
    )


def _text_of(value: Any, *, is_json: bool) -> str:
    if is_json and not isinstance(value, str):
        return _json(value)
    return "\n".join(part.text or part.title for part in _first_parts(_parts(value)))


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode(errors="replace")


class Space:
    """The room left on a page, so that the page stays below its size limit.

    A page has room for `characters`, at most `each` in one text, and for `parts`. A character takes
    up to eight bytes of a page.
    """

    def __init__(self, characters: int = 140_000, each: int = 3000, parts: int = 1000) -> None:
        self._left, self._each, self._parts = characters, each, parts

    def take(self, text: str | None, most: int) -> int:
        """Reserve room for a text, and return how many of its characters fit, at most `most`."""
        shown = min(len(text or ""), most, self._left)
        self._left -= shown
        return shown

    def fit(self, parts: Sequence[Part]) -> Iterator[tuple[Part, int]]:
        """Yield the parts that fit, each with the number of its characters to show."""
        for part in parts:
            if not self._parts:
                yield NOT_SHOWN_PART, 0
                return
            self.take(part.title + (part.tool_id or ""), 260)
            self._parts -= 1
            yield part, self.take(part.text, self._each)
