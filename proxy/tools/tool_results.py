"""Tool results in a call's request: which tool call each answers, and how the tool ended (pure).

Only results that answer the assistant's last turn are read: every later request of the thread
repeats them. `is_error` of Anthropic's API is a statement. Where it is left out the API means
false; the ledger keeps the two apart (`docs/decisions/019-tool-event-sources.md`).
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final
from uuid import UUID, uuid5

import msgspec

from proxy.formats.base import UNREADABLE, Object
from proxy.tools.contents import objects, texts
from proxy.tools.result_readers import ResultReaders
from store.records import Record, ToolEvent, ToolSource, ToolStatus

# The request's field that holds the conversation, by dialect.
FIELDS: Final[Mapping[str, str]] = {
    "chat": "messages",
    "messages": "messages",
    "responses": "input",
}
MAX_TEXT: Final = 1024
_RESULT_TYPES: Final = ("function_call_output", "custom_tool_call_output")
# The type of an item that the client adds to a response's input, beside messages, ends so.
_HEARD_SUFFIXES: Final = ("_output", "_response")

_members: Final = msgspec.json.Decoder(list[msgspec.Raw])
_member: Final = msgspec.json.Decoder(dict[str, Any])


class ToolResult(Record, frozen=True, kw_only=True):
    """The result of one tool call; `is_error` is None if the client did not state it."""

    tool_id: str
    name: str | None
    text: str
    is_error: bool | None = None


def result_events(
    call_id: UUID, dialect: str, parsed: Object | None, readers: ResultReaders
) -> tuple[ToolEvent, ...]:
    """Return the tool events of the results in a call's request.

    `parsed` is the request's top level. The same call gives the same events, ids included.
    """
    events: list[ToolEvent] = []
    for result in results_of(dialect, parsed):
        verdict = _judged(dialect, result, readers)
        if verdict is not None:
            status, source, detail = verdict
            events.append(
                ToolEvent(
                    id=uuid5(call_id, result.tool_id),
                    tool_id=result.tool_id,
                    name=result.name,
                    status=status,
                    detail=detail,
                    source=source,
                )
            )
    return tuple(events)


def _judged(
    dialect: str, result: ToolResult, readers: ResultReaders
) -> tuple[ToolStatus, ToolSource, str | None] | None:
    """Return the surest verdict on a result: stated, read by a rule, or assumed by default."""
    if result.is_error is not None:
        return ("error" if result.is_error else "ok"), "is_error", None
    read = readers.read(result.name, result.text)
    if read is not None:
        return read.status, "reader", read.detail
    if dialect == "messages" and not readers.ignores(result.name):
        return "ok", "assumed", None
    return None


def results_of(dialect: str, parsed: Object | None) -> list[ToolResult]:
    """Return the results that answer the assistant's last turn, the last one of each tool call."""
    raw = (parsed or {}).get(FIELDS.get(dialect, ""))
    if raw is None:
        return []
    try:
        members = _members.decode(raw)
    except UNREADABLE:
        # It is not a list, but a question without any earlier turn.
        return []
    after_turn: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    answering = False
    for member in _backwards(members):
        spoken = _is_assistants(member)
        if spoken and after_turn:
            names |= _called(member)
            answering = True
        elif answering:
            break
        elif not spoken:
            after_turn.append(member)
    by_tool_id: dict[str, ToolResult] = {}
    for member in reversed(after_turn):
        for result in _results(member, names):
            by_tool_id[result.tool_id] = result
    return list(by_tool_id.values())


def _backwards(members: list[msgspec.Raw]) -> Iterator[dict[str, Any]]:
    """Yield the members from last to first, each parsed only when it is reached."""
    for raw in reversed(members):
        try:
            yield _member.decode(raw)
        except UNREADABLE:
            # It is not an object, or Python cannot represent one of its values.
            continue


def _is_assistants(member: dict[str, Any]) -> bool:
    """Return whether a member is the model's: a message of its role, or an item of its output."""
    role, kind = member.get("role"), member.get("type")
    if isinstance(role, str):
        return role == "assistant"
    return isinstance(kind, str) and not kind.endswith(_HEARD_SUFFIXES)


def _called(member: dict[str, Any]) -> dict[str, str]:
    """Return the names of the tools that a member calls, by the calls' ids."""
    named_calls: list[tuple[Any, Any]] = [(member.get("call_id"), member.get("name"))]
    for call in objects(member.get("tool_calls")):
        of_kind = call.get("custom") if call.get("type") == "custom" else call.get("function")
        named_calls.append(
            (call.get("id"), of_kind.get("name") if isinstance(of_kind, dict) else None)
        )
    named_calls += [
        (block.get("id"), block.get("name"))
        for block in objects(member.get("content"))
        if block.get("type") == "tool_use"
    ]
    return {
        tool_id: name
        for tool_id, name in named_calls
        if isinstance(tool_id, str) and isinstance(name, str) and _storable(name)
    }


def _results(member: dict[str, Any], names: Mapping[str, str]) -> Iterator[ToolResult]:
    if member.get("role") == "tool":
        yield from _result(member.get("tool_call_id"), member.get("content"), names)
    elif member.get("type") in _RESULT_TYPES:
        yield from _result(member.get("call_id"), member.get("output"), names)
    else:
        for block in objects(member.get("content")):
            if block.get("type") == "tool_result":
                stated = block.get("is_error")
                yield from _result(
                    block.get("tool_use_id"),
                    block.get("content"),
                    names,
                    stated if isinstance(stated, bool) else None,
                )


def _result(
    tool_id: Any, content: Any, names: Mapping[str, str], is_error: bool | None = None
) -> Iterable[ToolResult]:
    """Return the result if it names its tool call; without an id it cannot be matched to any."""
    if not isinstance(tool_id, str) or not tool_id or not _storable(tool_id):
        return ()
    name = names.get(tool_id)
    return (
        ToolResult(tool_id=tool_id, name=name, text="\n".join(texts(content)), is_error=is_error),
    )


def _storable(text: str) -> bool:
    """Return whether a text keeps the limits that feedback has: its length, and no U+0000."""
    return len(text) <= MAX_TEXT and "\x00" not in text
