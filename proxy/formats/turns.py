"""Read the turns of a conversation, as far as all formats have them alike (pure).

A format's own class says where its messages lie and how they are written. Only tool results that
answer the assistant's last turn are read: every later request of the thread repeats them.

Whether a request shows the model text alone is read beside them. The prompt's token ids hold an
image, a sound or a file as a placeholder at most: what the model saw cannot be computed again from
them. A part of a type that nobody knows may be anything.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from proxy.formats.base import Object, ToolResult
from proxy.formats.contents import objects
from proxy.formats.conversation import Conversation, texts
from proxy.formats.requests import NULL, UNREADABLE, value_of

MAX_TEXT: Final = 1024
USER: Final = "user"
UNHEARD_ROLES: Final = ("system", "developer")
TOOL_ROLES: Final = ("tool", "function")
# What parsing a text raises that is no JSON, or that holds half a surrogate pair.
_NO_JSON: Final = (*UNREADABLE, UnicodeEncodeError)

_members: Final = msgspec.json.Decoder(list[msgspec.Raw])
_member: Final = msgspec.json.Decoder(dict[str, Any])
# A tool call's id, the tool's name, and the arguments, as they were sent.
Named = tuple[Any, Any, Any]
# Parts that become text in the prompt, in all APIs; clients mix their words. A part without a type
# is a text in vLLM, unless one of `MEDIA_FIELDS` says otherwise.
TEXT_PARTS: Final = frozenset(
    {
        *(None, "text", "input_text", "output_text", "refusal", "thinking", "redacted_thinking"),
        *("reasoning", "reasoning_text", "summary_text", "tool_use", "tool_result"),
        *("tool_reference", "search_result", "server_tool_use", "web_search_tool_result"),
        *("web_search_result", "mcp_tool_use", "mcp_tool_result", "compaction"),
    }
)
# vLLM reads a part with a `uuid` by these, whatever its type (`vllm/renderers/chat_utils.py`).
MEDIA_FIELDS: Final = frozenset(
    {
        *("image_url", "image_pil", "image_embeds", "audio_url", "input_audio", "audio_embeds"),
        *("video_url", "video_embeds", "prompt_embeds", "file"),
    }
)
STRUCTURES: Final = b"[{"

_objects: Final = msgspec.json.Decoder(list[Object])


class Called(NamedTuple):
    """Hold what the assistant's turn says of a tool call: the tool's name, and the arguments."""

    name: str | None
    arguments: Any


Calls = Mapping[str, Called]
_UNKNOWN: Final = Called(None, None)


class BaseTurns:
    """Read the turns of a format whose requests repeat the conversation in a list of members.

    As it stands it is for a format without turns: it finds nothing in any request.
    """

    # The request's field that holds the conversation.
    field: str = ""
    states_errors: bool = False
    continued_by_id: bool = False

    def continues(self, fields: Mapping[str, Any]) -> str | None:
        """Return the id of the reply that a request goes on from: none."""
        return None

    def shows_all(self, fields: Mapping[str, Any]) -> bool:
        """Return whether a request shows its conversation from the beginning: always."""
        return True

    def read(self, fields: Mapping[str, Any]) -> Conversation:
        """Return the conversation that a request shows."""
        conversation = Conversation()
        for member in objects(fields.get(self.field)):
            self._add(conversation, member)
        return conversation

    def said_by_users(self, parsed: Object) -> Iterable[msgspec.Raw]:
        """Return what users say in a request, message by message, each a content unparsed."""
        members = members_of(parsed.get(self.field)) or ()
        return (said for member in members if (said := self._said_by_user(member)) is not None)

    def only_text(self, parsed: Object) -> bool:
        """Return whether all that a request shows and asks for is text: no image, sound or file."""
        members = members_of(parsed.get(self.field))
        return members is not None and all(map(self._is_text, members))

    def results(self, parsed: Object | None) -> list[ToolResult]:
        """Return the tool results that answer the assistant's last turn, one for each tool call."""
        raw = (parsed or {}).get(self.field)
        if raw is None:
            return []
        try:
            members = _members.decode(raw)
        except UNREADABLE:
            # It is not a list, but a question without any earlier turn.
            return []
        after_turn, calls = self._last_turn(members)
        by_tool_id: dict[str, ToolResult] = {}
        for member in reversed(after_turn):
            for result in self._results_in(member, calls):
                by_tool_id[result.tool_id] = result
        return list(by_tool_id.values())

    def _last_turn(self, members: list[msgspec.Raw]) -> tuple[list[dict[str, Any]], Calls]:
        """Return what follows the assistant's last turn, newest first, and its tool calls."""
        after_turn: list[dict[str, Any]] = []
        calls: dict[str, Called] = {}
        answering = False
        for member in _backwards(members):
            spoken = self._is_assistants(member)
            if spoken and after_turn:
                calls |= _storable_calls(self._called(member))
                answering = True
            elif answering:
                break
            elif not spoken:
                after_turn.append(member)
        return after_turn, calls

    def _add(self, conversation: Conversation, member: dict[str, Any]) -> None:
        """Add one member of the conversation to `conversation`."""

    def _said_by_user(self, member: Object) -> msgspec.Raw | None:
        """Return what a user says in a member; None: it is somebody else's."""
        return member.get("content", NULL) if value_of(member.get("role")) == USER else None

    def _is_text(self, member: Object) -> bool:
        """Return whether one member of the conversation is all text."""
        return is_only_text(member.get("content"))

    def _is_assistants(self, member: dict[str, Any]) -> bool:
        """Return whether a member is the model's."""
        return member.get("role") == "assistant"

    def _called(self, member: dict[str, Any]) -> Iterable[Named]:
        """Return the tool calls that a member of the model's makes."""
        return ()

    def _results_in(self, member: dict[str, Any], calls: Calls) -> Iterable[ToolResult]:
        """Return the tool results in a member; `calls` are the tool calls by their ids."""
        return ()


def tool_result(
    tool_id: Any, content: Any, calls: Calls, is_error: bool | None = None
) -> Iterable[ToolResult]:
    """Return the result if it names its tool call; without an id it cannot be matched to any."""
    if not isinstance(tool_id, str) or not tool_id or not _storable(tool_id):
        return ()
    called = calls.get(tool_id, _UNKNOWN)
    return (
        ToolResult(
            tool_id=tool_id,
            name=called.name,
            text="\n".join(texts(content)),
            is_error=is_error,
            texts=_texts_in(called.arguments),
        ),
    )


def _texts_in(arguments: Any) -> tuple[str, ...]:
    """Return the texts among a tool call's arguments: an object's members, or the whole of it."""
    given = arguments
    if isinstance(arguments, str):
        try:
            given = msgspec.json.decode(arguments)
        except _NO_JSON:
            # Custom tools take a text as it is.
            return (arguments,)
    members = given.values() if isinstance(given, dict) else ()
    return tuple(value for value in members if isinstance(value, str))


def _backwards(members: list[msgspec.Raw]) -> Iterator[dict[str, Any]]:
    """Yield the members from last to first, each parsed only when it is reached."""
    for raw in reversed(members):
        try:
            yield _member.decode(raw)
        except UNREADABLE:
            # It is not an object, or Python cannot represent one of its values.
            continue


def _storable_calls(calls: Iterable[Named]) -> dict[str, Called]:
    return {
        tool_id: Called(name if isinstance(name, str) and _storable(name) else None, arguments)
        for tool_id, name, arguments in calls
        if isinstance(tool_id, str)
    }


def _storable(text: str) -> bool:
    """Return whether a text keeps the limits that feedback has: its length, and no U+0000."""
    return len(text) <= MAX_TEXT and "\x00" not in text


def members_of(raw: msgspec.Raw | None) -> list[Object] | None:
    """Return a list's members with their values unparsed, or None if it is no list of objects."""
    if not _has_parts(raw):
        return []
    try:
        return _objects.decode(raw or b"")
    except UNREADABLE:
        return None


def is_only_text(content: msgspec.Raw | None) -> bool:
    """Return whether a content, which is a text, a part or a list of parts, is all text."""
    if not _has_parts(content):
        return True
    try:
        return is_text(msgspec.json.decode(content or b""))
    except UNREADABLE:
        return False


def is_given(raw: msgspec.Raw | None) -> bool:
    """Return whether a field has a value other than null."""
    return raw is not None and raw != NULL


def _has_parts(raw: msgspec.Raw | None) -> bool:
    # Without a copy: it may be all of a conversation.
    return raw is not None and memoryview(raw)[0] in STRUCTURES


def is_text(content: Any) -> bool:
    """Return whether a parsed content is all text; a tool's result has a content of its own."""
    if isinstance(content, list):
        return all(map(is_text, content))
    if not isinstance(content, dict):
        return True
    kind = content.get("type")
    known = isinstance(kind, str | None) and kind in TEXT_PARTS
    return known and MEDIA_FIELDS.isdisjoint(content) and is_text(content.get("content"))
