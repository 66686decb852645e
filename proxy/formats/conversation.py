"""Read the conversation that a request shows: its fingerprints, tool results and media (pure).

`Conversation` normalises a conversation, however a client sends it back. Clients rebuild a server's
replies: content as null, "" or a list of parts, arguments encoded anew, reasoning left out or
repeated, marks added, system prompts changed. Speakers and their words stay the same. So a
conversation is read as three kinds of pieces: assistant output (consecutive messages are one
piece), user messages, and tool results. System prompts are left out. A tool call with a unique id
is represented by its id alone, without arguments and result. The pieces are hashed as a chain, so
that the digests of all prefixes of a thread cost one pass.

`Turns` walks over a request's messages. Each wire format has a subclass that knows their place and
form.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import copy
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import msgspec

from proxy.formats.raw_json import NULL, UNREADABLE, Object, value_of
from store.records import Record

# Bytes of a digest.
DIGEST_BYTES: Final = 16
# From 2048 bytes on hashlib releases the GIL: other threads would run, and this one would wait
# to get it back. So longer data is hashed in smaller pieces.
_HASHED_AT_ONCE: Final = 2000
# Requests with longer pieces are read in a thread: hashing frees the GIL for the event loop.
_LONG_PIECE: Final = 2**20
# `call_1` and `functions.add:0` are counters, the same for every client. A long number is random:
# Gemini's ids end in such a number, and so does one in 2,000 of vLLM's ids (16 hex digits).
_RANDOM_TAIL: Final = re.compile(
    r"(?:(?=[A-Za-z]*[0-9])(?=[0-9]*[A-Za-z])[A-Za-z0-9]{8,}|[1-9][0-9]{15,})\Z", re.ASCII
)
_NOT_ALNUM: Final = re.compile(r"[^A-Za-z0-9]")
# OpenClaw ends each request with a message with this prefix, and omits it from later requests.
_FOR_ONE_REQUEST: Final = b"<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>"
_THOUGHT_END: Final = "</think>"
_TEXT_TYPES: Final = ("text", "input_text", "output_text")


def is_unique_id(tool_id: str) -> bool:
    """Return whether a tool call's id is random enough to have been handed out only once.

    Its last alphanumeric run must have at least eight characters, with both letters and digits, or
    be a number of at least 16 digits that does not begin with 0.
    """
    return _RANDOM_TAIL.match(_NOT_ALNUM.split(tool_id)[-1]) is not None


def letters_and_digits(tool_id: str) -> str:
    """Return a unique tool call id without other characters, which some clients strip."""
    return _NOT_ALNUM.sub("", tool_id)


class Conversation:
    """Hash chain over the pieces of a conversation.

    `replies` has an entry for each run of assistant messages that is followed by another message:
    the digest of the prefix ending with it, and whether that prefix contains a unique tool call id.
    `results` holds the ids of the tool results after the last such run.
    """

    def __init__(self) -> None:
        self.replies: list[tuple[bytes, bool]] = []
        self.results: list[str] = []
        self._state = bytes(DIGEST_BYTES)
        self._unique = False
        self._texts: list[str] = []
        self._calls: list[bytes] = []

    def copy(self) -> "Conversation":
        """Return a copy to which only assistant text and tool calls may be added.

        It shares `replies` and `results` with the original.
        """
        copied = copy(self)
        copied._texts, copied._calls = [*self._texts], [*self._calls]
        return copied

    def add_user(self, content: Any) -> None:
        """Add a user's text or list of parts, unless empty or sent with this request only."""
        piece = _content_bytes(content)
        if piece and not piece.startswith(_FOR_ONE_REQUEST):
            self._add_turn(b"u", piece)

    def add_user_turn(self, content: Any) -> None:
        """Add a user's turn: first its tool results, then its other blocks."""
        if not isinstance(content, list):
            self.add_user(content)
            return
        others = []
        for part in content:
            if isinstance(part, dict) and part.get("type") == "tool_result":
                self.add_tool_result(part.get("tool_use_id"), part.get("content"))
            else:
                others.append(part)
        self.add_user(others)

    def add_tool_result(self, tool_id: Any, content: Any) -> None:
        name = tool_id if isinstance(tool_id, str) else ""
        if is_unique_id(name):
            self._unique = True
            self._add_turn(b"t", _encoded(letters_and_digits(name)))
        else:
            self._add_turn(b"t" + _encoded(name) + b"\0", _content_bytes(content))
        self.results.append(name)

    def add_assistant(self, content: Any) -> None:
        """Add the assistant's text, or the texts in its list of parts, without thoughts."""
        for text in texts_of(content):
            answer = text.rpartition(_THOUGHT_END)[2] if _THOUGHT_END in text else text
            if answer := answer.strip():
                self._texts.append(answer)

    def add_tool_call(self, tool_id: Any, name: Any, arguments: Any) -> None:
        identifier = tool_id if isinstance(tool_id, str) else ""
        if is_unique_id(identifier):
            self._unique = True
            self._calls.append(_encoded(letters_and_digits(identifier)))
        else:
            label = _encoded(f"{identifier}\0{name}\0")
            self._calls.append(label + canonical_arguments(arguments))

    def add_tool_use_blocks(self, content: Any) -> None:
        """Add the tool calls among the blocks of the assistant's content (Anthropic's form)."""
        for block in blocks_of(content, "tool_use"):
            self.add_tool_call(block.get("id"), block.get("name"), block.get("input"))

    def open_reply_digest(self) -> tuple[bytes, bool] | None:
        """Return the digest of the conversation, if it ends with the assistant.

        A later request that begins with the same conversation is recognised by this digest.

        Returns:
            The digest, and whether a tool call or result in the conversation has a unique id:
            without one, other conversations may have the same digest. None if the conversation
            does not end with the assistant.
        """
        if not (self._texts or self._calls):
            return None
        pieces = [_encoded("".join(self._texts)), *self._calls]
        lengths = ",".join([str(len(piece)) for piece in pieces])
        run = b"".join([self._state, b"a", lengths.encode(), b":", *pieces])
        return _digest(run), self._unique

    def _add_turn(self, kind: bytes, piece: bytes) -> None:
        """Add a user message or a tool result (see `kind`), after an open assistant reply."""
        reply = self.open_reply_digest()
        if reply is not None:
            self._state = reply[0]
            self.replies.append(reply)
            self.results = []
            self._texts, self._calls = [], []
        if len(piece) < _LONG_PIECE:
            self._state = _digest(self._state + kind + piece)
        else:
            # Avoids a copy of the piece, and releases the GIL.
            state = blake2b(self._state + kind, digest_size=DIGEST_BYTES)
            state.update(piece)
            self._state = state.digest()


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the members of a list that are objects; nothing if the value is not a list."""
    for member in value if isinstance(value, list) else ():
        if isinstance(member, dict):
            yield member


def blocks_of(content: Any, kind: str) -> Iterator[dict[str, Any]]:
    """Return the blocks of type `kind` in a list of content blocks; nothing for other content."""
    return (block for block in objects(content) if block.get("type") == kind)


def texts_of(content: Any) -> Iterable[str]:
    """Return the texts of a message's content, which is a string or a list of parts."""
    if isinstance(content, str):
        return (content,)
    return (part["text"] for part in objects(content) if _is_text_part(part))


def canonical_arguments(arguments: Any) -> bytes:
    """Return a tool call's arguments as canonical JSON: keys sorted, 2.0 as 2.

    None and "" mean no arguments, like {}. Text that is not JSON is only stripped.
    """
    if arguments is None or arguments == "":
        return b"{}"
    encoded = _encoded(arguments) if isinstance(arguments, str) else _sorted_json(arguments)
    try:
        return _sorted_json(_ARGUMENTS.decode(encoded))
    except (msgspec.MsgspecError, RecursionError):
        return encoded.strip()


def _number(literal: str) -> float | int:
    value = float(literal)
    return int(value) if value.is_integer() else value


_ARGUMENTS: Final = msgspec.json.Decoder(float_hook=_number)


def _is_text_part(part: dict[str, Any]) -> bool:
    return part.get("type") in _TEXT_TYPES and isinstance(part.get("text"), str)


def _content_bytes(content: Any) -> bytes:
    """Return a user's or a tool's content as bytes: text as it is, anything else as sorted JSON."""
    if isinstance(content, str):
        return _encoded(content)
    if not isinstance(content, list):
        return b"" if content is None else b"\0" + _sorted_json(content)
    return b"".join([_part_bytes(part) for part in content])


def _part_bytes(part: Any) -> bytes:
    if isinstance(part, dict):
        if _is_text_part(part):
            return _encoded(part["text"])
        part = {name: value for name, value in part.items() if name != "cache_control"}
    return b"\0" + _sorted_json(part)


def _sorted_json(value: Any) -> bytes:
    return msgspec.json.encode(value, order="sorted")


def _encoded(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _digest(data: bytes) -> bytes:
    state = blake2b(data[:_HASHED_AT_ONCE], digest_size=DIGEST_BYTES)
    for start in range(_HASHED_AT_ONCE, len(data), _HASHED_AT_ONCE):
        state.update(data[start : start + _HASHED_AT_ONCE])
    return state.digest()


# Most characters of a tool's id or name that feedback can store.
MAX_TEXT: Final = 1024
# Roles of system prompts, which are not part of the conversation.
SYSTEM_ROLES: Final = ("system", "developer")
TOOL_ROLES: Final = ("tool", "function")
# Types of parts that become prompt text, of all APIs, since clients mix them. vLLM reads a part
# without a type as text, unless it has one of `MEDIA_FIELDS`.
TEXT_PARTS: Final = frozenset(
    {
        *(None, "text", "input_text", "output_text", "refusal", "thinking", "redacted_thinking"),
        *("reasoning", "reasoning_text", "summary_text", "tool_use", "tool_result"),
        *("tool_reference", "search_result", "server_tool_use", "web_search_tool_result"),
        *("web_search_result", "mcp_tool_use", "mcp_tool_result", "compaction"),
        *("tool_addition", "tool_removal"),
    }
)
# vLLM reads a part with a `uuid` by these fields, not by type (`vllm/renderers/chat_utils.py`).
MEDIA_FIELDS: Final = frozenset(
    {
        *("image_url", "image_pil", "image_embeds", "audio_url", "input_audio", "audio_embeds"),
        *("video_url", "video_embeds", "prompt_embeds", "file"),
    }
)
# First bytes of JSON lists and objects.
STRUCTURES: Final = b"[{"
# Errors of parsing a text that is not JSON or has a lone surrogate.
_NOT_JSON: Final = (*UNREADABLE, UnicodeEncodeError)
_members: Final = msgspec.json.Decoder(list[msgspec.Raw])
_member: Final = msgspec.json.Decoder(dict[str, Any])
_objects: Final = msgspec.json.Decoder(list[Object])


class ToolResult(Record, frozen=True, kw_only=True):
    """Result of one tool call; `is_error` is None if the client did not state it.

    `texts` are the tool call's string arguments, empty if the request does not show the call.
    """

    tool_id: str
    name: str | None
    text: str
    is_error: bool | None = None
    texts: tuple[str, ...] = ()


class ShownToolCall(NamedTuple):
    """Tool call as a request shows it: id, tool name and arguments, unchecked."""

    tool_id: Any
    name: Any
    arguments: Any


# The tool calls of the assistant's turn, by their ids.
Calls = Mapping[str, ShownToolCall]


class Turns:
    """Reader of the conversation that a request repeats in `field`, a list of members.

    The base class is for formats without turns: it finds nothing. Subclasses override the methods
    that begin with an underscore.

    Only tool results that answer the assistant's last turn are read: earlier results were read with
    an earlier request. The prompt's token ids hold at most placeholders for images, sounds and
    files, so that the model's input cannot be computed again: `only_text` returns whether a request
    has none. A part of an unknown type counts as media.
    """

    field: str = ""
    # The field of the system prompt, in formats that keep it outside of `field`.
    instructions: str = ""
    # Whether a tool result without a mark of failure states that the tool succeeded.
    states_errors: bool = False
    # Whether a request may continue an earlier reply by naming the reply's id.
    continued_by_id: bool = False

    def continued_reply_id(self, fields: Mapping[str, Any]) -> str | None:
        """Return the id of the reply that a request continues, or None if it names none."""
        return None

    def shows_all(self, fields: Mapping[str, Any]) -> bool:
        """Return whether a request shows its conversation from the beginning."""
        return True

    def read(self, fields: Mapping[str, Any]) -> Conversation:
        """Return the conversation that a request shows."""
        conversation = Conversation()
        for member in objects(fields.get(self.field)):
            self._add(conversation, member)
        return conversation

    def user_contents(self, parsed: Object) -> Iterable[msgspec.Raw]:
        """Return the contents of a request's user messages, unparsed.

        Nothing if there are none, or if the format does not separate users from instructions.

        Raises:
            MsgspecError, UnicodeDecodeError, RecursionError: a part cannot be read; may be raised
                during iteration.
        """
        contents = map(self._user_content, members_of(parsed.get(self.field)) or ())
        return (content for content in contents if content is not None)

    def system_contents(self, parsed: Object) -> Iterable[msgspec.Raw]:
        """Return the contents of the system prompts that a request begins with, unparsed.

        Raises:
            MsgspecError, UnicodeDecodeError, RecursionError: a part cannot be read; may be raised
                during iteration.
        """
        if self.instructions in parsed:
            yield parsed[self.instructions]
        for member in members_of(parsed.get(self.field)) or ():
            if value_of(member.get("role")) not in SYSTEM_ROLES:
                break
            yield member.get("content", NULL)

    def only_text(self, parsed: Object) -> bool:
        """Return whether a request contains and asks for only text: no image, sound or file."""
        members = members_of(parsed.get(self.field))
        return members is not None and all(map(self._is_text, members))

    def results(self, parsed: Object | None) -> list[ToolResult]:
        """Return the tool results that answer the assistant's last turn, one for each tool call."""
        return [result for _, result in self.executions(parsed)]

    def executions(
        self, parsed: Object | None
    ) -> Collection[tuple[ShownToolCall | None, ToolResult]]:
        """Return the results after the assistant's last turn, each with its tool call.

        The call is None if the request does not show it.
        """
        raw = (parsed or {}).get(self.field)
        if raw is None:
            return ()
        try:
            members = _members.decode(raw)
        except UNREADABLE:
            # A prompt without earlier turns, not a list.
            return ()
        after_turn, calls = self._last_turn(members)
        return {
            result.tool_id: (calls.get(result.tool_id), result)
            for member in reversed(after_turn)
            for result in self._results_in(member, calls)
        }.values()

    def _last_turn(self, members: list[msgspec.Raw]) -> tuple[list[dict[str, Any]], Calls]:
        """Return the members after the assistant's last turn, and that turn's tool calls by id.

        The newest member comes first. A turn at the end of the conversation is skipped.
        """
        after_turn: list[dict[str, Any]] = []
        calls: dict[str, ShownToolCall] = {}
        in_turn = False
        for member in _members_backwards(members):
            is_by_assistant = self._is_by_assistant(member)
            if is_by_assistant and after_turn:
                for call in self._tool_calls(member):
                    if isinstance(call.tool_id, str):
                        calls[call.tool_id] = call
                in_turn = True
            elif in_turn:
                break
            elif not is_by_assistant:
                after_turn.append(member)
        return after_turn, calls

    def _add(self, conversation: Conversation, member: dict[str, Any]) -> None:
        """Add one member of the conversation to `conversation`."""

    def _user_content(self, member: Object) -> msgspec.Raw | None:
        """Return a member's content if a user wrote it, else None."""
        return member.get("content", NULL) if value_of(member.get("role")) == "user" else None

    def _is_text(self, member: Object) -> bool:
        """Return whether one member of the conversation is all text."""
        return is_only_text(member.get("content"))

    def _is_by_assistant(self, member: dict[str, Any]) -> bool:
        """Return whether the assistant wrote a member."""
        return member.get("role") == "assistant"

    def _tool_calls(self, member: dict[str, Any]) -> Iterable[ShownToolCall]:
        """Return the tool calls in a member that the assistant wrote."""
        return ()

    def _results_in(self, member: dict[str, Any], calls: Calls) -> Iterable[ToolResult]:
        """Return the tool results in a member; `calls` has the answered tool calls by their ids."""
        return ()


def tool_result(
    tool_id: Any, content: Any, calls: Calls, is_error: bool | None = None
) -> Iterable[ToolResult]:
    """Return one result, or none if its id is missing, above `MAX_TEXT`, or has U+0000."""
    if not isinstance(tool_id, str) or not tool_id or not _is_storable(tool_id):
        return ()
    call = calls.get(tool_id)
    name = call.name if call is not None else None
    return (
        ToolResult(
            tool_id=tool_id,
            name=name if isinstance(name, str) and _is_storable(name) else None,
            text="\n".join(texts_of(content)),
            is_error=is_error,
            texts=_texts_in(call.arguments) if call is not None else (),
        ),
    )


def _texts_in(arguments: Any) -> tuple[str, ...]:
    """Return a tool call's string arguments, or the whole text if the arguments are not JSON."""
    given = arguments
    if isinstance(arguments, str):
        try:
            given = msgspec.json.decode(arguments)
        except _NOT_JSON:
            # Custom tools take plain text.
            return (arguments,)
    members = given.values() if isinstance(given, dict) else ()
    return tuple(value for value in members if isinstance(value, str))


def _members_backwards(members: list[msgspec.Raw]) -> Iterator[dict[str, Any]]:
    """Yield the members from last to first, each parsed only when it is reached."""
    for raw in reversed(members):
        try:
            yield _member.decode(raw)
        except UNREADABLE:
            # Not an object, or Python cannot represent one of its values.
            continue


def _is_storable(text: str) -> bool:
    """Return whether feedback may have a text: not longer than `MAX_TEXT`, without U+0000."""
    return len(text) <= MAX_TEXT and "\x00" not in text


def members_of(raw: msgspec.Raw | None) -> list[Object] | None:
    """Return a list's objects with values unparsed, [] for a scalar or None, None if unreadable."""
    if not _has_parts(raw):
        return []
    try:
        return _objects.decode(raw or b"")
    except UNREADABLE:
        return None


def is_only_text(content: msgspec.Raw | None) -> bool:
    """Return whether a message's content (a string, a part or a list of parts) is all text."""
    if not _has_parts(content):
        return True
    try:
        return is_text(msgspec.json.decode(content or b""))
    except UNREADABLE:
        return False


def is_text(content: Any) -> bool:
    """Return whether parsed content is all text, including the nested content of tool results."""
    if isinstance(content, list):
        return all(map(is_text, content))
    if not isinstance(content, dict):
        return True
    kind = content.get("type")
    known = isinstance(kind, str | None) and kind in TEXT_PARTS
    return known and MEDIA_FIELDS.isdisjoint(content) and is_text(content.get("content"))


def _has_parts(raw: msgspec.Raw | None) -> bool:
    # `memoryview` avoids a copy: `raw` may be a whole conversation.
    return raw is not None and memoryview(raw)[0] in STRUCTURES
