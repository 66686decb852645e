"""Show what was said in a call, whatever its wire format (pure).

A request repeats its conversation from the beginning, so of each is shown what it adds to the one
before. All three APIs with turns write messages in shapes of their own, which do not contradict
each other: `said_in` reads them all, and shows what it does not know as JSON.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, Literal

import msgspec

from proxy.formats.conversation import objects
from proxy.formats.raw_json import (
    ARRAY,
    UNREADABLE,
    parse_object,
    string_or_none,
)
from proxy.formats.registry import FORMATS
from store.records import Record
from store.values.documents import nests_too_deep

Kind = Literal["text", "thought", "call", "result", "media", "other", "more"]
# Of a message, and of each list in one: what is left out is a part of kind `more`.
MOST_PARTS: Final = 200
# What instructions are written into, beside messages, in the API that has it.
_INSTRUCTIONS: Final = ("system", "instructions")
_TEXTS: Final = frozenset({None, "text", "input_text", "output_text", "refusal"})
_THOUGHTS: Final = frozenset({"thinking", "reasoning", "reasoning_text", "redacted_thinking"})
_CALLS: Final = frozenset({"tool_use", "function_call", "custom_tool_call", "server_tool_use"})
_RESULTS: Final = frozenset({"tool_result", "function_call_output", "custom_tool_call_output"})
_MEDIA: Final = ("image", "audio", "file", "video", "document", "input_image", "input_file")


class Part(Record, frozen=True, kw_only=True):
    """Hold a piece of a message; `title` is a tool's name, or a type. `shown` characters fit."""

    kind: Kind
    text: str
    title: str = ""
    tool_id: str | None = None
    shown: int = 0


class Said(Record, frozen=True, kw_only=True):
    """Hold what one message says."""

    role: str
    parts: tuple[Part, ...]

    @property
    def words(self) -> tuple[object, ...]:
        """Return what tells it from other messages: all but the ids of tool calls."""
        return self.role, *((part.kind, part.title, part.text) for part in self.parts)


class Asked(Record, frozen=True, kw_only=True):
    """Hold the conversation that a request shows, message by message, unparsed."""

    instructions: tuple[bytes, ...] = ()
    members: tuple[bytes, ...] = ()
    tools: int = 0


def asked_in(dialect: str, body: bytes | None) -> Asked | None:
    """Return the conversation in a request of a format; None if it is not a JSON object."""
    fields = None if body is None or nests_too_deep(body) else parse_object(body)
    if fields is None:
        return None
    field = FORMATS[dialect].turns.field if dialect in FORMATS else ""
    given = bytes(fields.get(field or "prompt", b""))
    members = _members(given) if field and given[:1] == ARRAY else [given] if given else []
    return Asked(
        instructions=tuple(bytes(fields[name]) for name in _INSTRUCTIONS if name in fields),
        members=tuple(members),
        tools=len(_members(bytes(fields.get("tools", b"")))),
    )


def _members(raw: bytes) -> list[bytes]:
    try:
        return [bytes(one) for one in msgspec.json.decode(raw, type=list[msgspec.Raw])]
    except UNREADABLE:
        return [raw] if raw else []


class Added(Record, frozen=True, kw_only=True):
    """Hold what a request adds to the one before: `same` of its messages are repeated.

    `left_out` of the messages before are not: the agent shortened its history, or changed it.
    `repeats_reply` says that it sent the last reply back as it was, which is then left out.
    `more` counts added messages that are not shown.
    """

    said: tuple[Said, ...]
    same: int = 0
    left_out: int = 0
    repeats_reply: bool = False
    more: int = 0
    tools: int = 0


# Of the messages that a request adds: what is shown of more is their beginning and their end.
MOST_MESSAGES: Final = 40


def added(asked: Asked, base: Asked | None, reply: Sequence[Said]) -> Added:
    """Return what a request adds to the one before it, `base`, and to the `reply` to that."""
    before = base or Asked()
    same = 0
    for one, other in zip(asked.members, before.members, strict=False):
        if one != other:
            break
        same += 1
    instructions = [one for one in asked.instructions if one not in before.instructions]
    new = asked.members[same:]
    said = [_read(one, "system") for one in instructions]
    head = MOST_MESSAGES // 2
    skipped = max(len(new) - MOST_MESSAGES, 0)
    kept = new if not skipped else (*new[:head], *new[-head:])
    said += [_read(one, "user") for one in kept]
    repeated = _repeated(said[len(instructions) :], reply)
    return Added(
        said=tuple(said[: len(instructions)] + said[len(instructions) + repeated :]),
        same=same,
        left_out=len(before.members) - same,
        repeats_reply=repeated > 0,
        more=skipped,
        tools=asked.tools,
    )


def _repeated(said: Sequence[Said], reply: Sequence[Said]) -> int:
    """Return how many messages at the beginning are the reply, sent back."""
    spoken = [part for one in reply for part in one.parts if part.kind in ("text", "call")]
    sent: list[Part] = []
    for count, one in enumerate(said, start=1):
        if one.role != "assistant":
            return 0
        sent += [part for part in one.parts if part.kind in ("text", "call")]
        if [_bare(part) for part in sent] == [_bare(part) for part in spoken]:
            return count if spoken else 0
    return 0


def _bare(part: Part) -> tuple[str, str, str]:
    return part.kind, part.title, part.text.strip()


def _read(raw: bytes, role: str) -> Said:
    """Return what an unparsed message says; `role` speaks where it names none."""
    try:
        value = msgspec.json.decode(raw)
    except UNREADABLE:
        value = raw.decode(errors="replace")
    return said_in(value, role)


def said_in(member: Any, role: str) -> Said:
    """Return what a message says, or an item of one; `role` speaks where it names none."""
    if not isinstance(member, dict):
        return Said(role=role, parts=_first(_parts(member)))
    kind, named = member.get("type"), member.get("role")
    if kind in _RESULTS:
        return Said(role="tool", parts=_first(_part(member)))
    if not isinstance(named, str):
        return Said(
            role="assistant" if isinstance(kind, str) else role, parts=_first(_part(member))
        )
    return Said(role=named[:40], parts=_first(_of_message(named, member)))


def _first(parts: Iterator[Part]) -> tuple[Part, ...]:
    kept = tuple(islice(parts, MOST_PARTS + 1))
    return kept if next(parts, None) is None else (*kept, _more("others"))


def _listed(
    members: Sequence[dict[str, Any]], read: Callable[[dict[str, Any]], Iterable[Part]]
) -> Iterator[Part]:
    for member in islice(members, MOST_PARTS):
        yield from read(member)
    if len(members) > MOST_PARTS:
        yield _more(f"{len(members) - MOST_PARTS:,}")


def _more(what: str) -> Part:
    return Part(kind="more", text="", title=f"{what} are not shown")


def _text_of(content: Any) -> str:
    return "\n".join(part.text or part.title for part in _first(_parts(content)))


def _of_message(role: str, message: dict[str, Any]) -> Iterator[Part]:
    thought = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(thought, str):
        yield Part(kind="thought", text=thought)
    if role in ("tool", "function"):
        text = _text_of(message.get("content"))
        tool_id, name = message.get("tool_call_id"), message.get("name")
        yield Part(kind="result", text=text, title=_name(name), tool_id=string_or_none(tool_id))
        return
    yield from _parts(message.get("content"))
    refusal = message.get("refusal")
    if isinstance(refusal, str):
        yield Part(kind="text", text=refusal, title="refusal")
    yield from _listed(list(objects(message.get("tool_calls"))), _tool_call)
    function = message.get("function_call")
    if isinstance(function, dict):
        yield _call(None, function.get("name"), function.get("arguments"))


def _tool_call(call: dict[str, Any]) -> Iterator[Part]:
    of_kind = call.get("custom" if call.get("type") == "custom" else "function")
    given = of_kind if isinstance(of_kind, dict) else {}
    yield _call(call.get("id"), given.get("name"), given.get("arguments", given.get("input")))


def _parts(content: Any) -> Iterator[Part]:
    """Return the parts of a content: a text, a list of parts, or nothing."""
    if isinstance(content, str):
        yield Part(kind="text", text=content)
    elif isinstance(content, list) and all(isinstance(one, dict) for one in content):
        yield from _listed(content, _part)
    elif content is not None:
        yield Part(kind="other", text=_json(content))


def _part(part: dict[str, Any]) -> Iterator[Part]:
    kind = part.get("type")
    name = _name(kind)
    if kind in _CALLS:
        identifier = part.get("call_id", part.get("id"))
        yield _call(identifier, part.get("name"), part.get("arguments", part.get("input")))
    elif kind in _RESULTS:
        text = _text_of(part.get("output", part.get("content")))
        failed = "error" if part.get("is_error") is True else ""
        tool_id = string_or_none(part.get("tool_use_id", part.get("call_id")))
        yield Part(kind="result", text=text, title=failed, tool_id=tool_id)
    elif kind in _THOUGHTS:
        texts = [part.get("thinking"), part.get("text"), part.get("data")]
        texts += [one.get("text") for of in ("summary", "content") for one in objects(part.get(of))]
        text = "\n".join(one for one in texts if isinstance(one, str))
        yield Part(kind="thought", text=text)
    elif kind in _TEXTS and isinstance(spoken := part.get("text", part.get("refusal")), str):
        yield Part(kind="text", text=spoken)
    elif kind == "message" or (kind is None and "content" in part):
        yield from _parts(part.get("content"))
    elif isinstance(kind, str) and kind.startswith(_MEDIA):
        text = _json(part)
        yield Part(
            kind="media", text=text if len(text) < 300 else f"{len(text):,} characters", title=name
        )
    else:
        yield Part(kind="other", text=_json(part), title=name)


def _call(tool_id: Any, name: Any, arguments: Any) -> Part:
    text = arguments if isinstance(arguments, str) else _json(arguments)
    return Part(kind="call", text=text, title=_name(name), tool_id=string_or_none(tool_id))


def _name(value: Any) -> str:
    return value[:200] if isinstance(value, str) else ""


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode(errors="replace")


def reply_in(body: bytes | None) -> tuple[Said, ...]:
    """Return what a reply says, in whichever format; a failure is shown as it is."""
    if body is None:
        return ()
    try:
        reply = None if nests_too_deep(body) else msgspec.json.decode(body, type=dict[str, Any])
    except UNREADABLE:
        reply = None
    if reply is None:
        return (
            Said(role="reply", parts=(Part(kind="other", text=body.decode(errors="replace")),)),
        )
    choices = [one.get("message", one.get("text")) for one in objects(reply.get("choices"))]
    if choices or isinstance(reply.get("output"), list):
        said = choices or list(objects(reply["output"]))
        left = len(said) - MOST_MESSAGES
        shown = tuple(said_in(one, "assistant") for one in said[:MOST_MESSAGES])
        return (*shown, Said(role="reply", parts=(_more(f"{left:,}"),))) if left > 0 else shown
    if "content" in reply and "error" not in reply:
        return (Said(role="assistant", parts=_first(_parts(reply["content"]))),)
    role = "error" if "error" in reply else "reply"
    return (Said(role=role, parts=(Part(kind="other", text=_json(reply)),)),)


class Space:
    """Give out what a page has room for, characters and parts, so that it stays below its limit."""

    def __init__(self, characters: int, each: int, parts: int = 1000) -> None:
        """Begin with room for so many, of one text `each` at most."""
        self._left, self._each, self._parts = characters, each, parts

    def fit(self, said: Sequence[Said]) -> tuple[Said, ...]:
        """Return messages with how much of each part is shown."""
        return tuple(msgspec.structs.replace(one, parts=self._fitting(one.parts)) for one in said)

    def _fitting(self, parts: Sequence[Part]) -> tuple[Part, ...]:
        kept = tuple(map(self._fitted, parts[: self._parts]))
        self._parts -= len(kept)
        return kept if len(kept) == len(parts) else (*kept, _more(f"{len(parts) - len(kept):,}"))

    def _fitted(self, part: Part) -> Part:
        shown = min(len(part.text), self._each, self._left)
        self._left = max(self._left - shown - len(part.title), 0)
        return msgspec.structs.replace(part, shown=shown)
