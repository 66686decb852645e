"""A conversation as every client sends it back, in one form (pure).

Clients rebuild what a server said: content as null, "" or a list of parts, arguments encoded
anew, reasoning left out or repeated, marks added, system prompts changed. What they keep is
who said what. So a conversation is read as three kinds of pieces: what the assistant said (a
run of its messages is one), what it heard, and the results of tools; system prompts are no
part of it. A tool call whose id is unique is that id: arguments and results add nothing to
it. The pieces are hashed as a chain, so that all prefixes of a thread cost one pass.
"""

import re
from hashlib import blake2b
from typing import Any, Final

import msgspec

from proxy.contents import is_text, objects, texts

SIZE: Final = 16
# From 2048 bytes on hashlib lets other threads run meanwhile: they would, and we should wait.
_PIECE: Final = 2000
_UNHEARD_ROLES: Final = ("system", "developer")
_TOOL_ROLES: Final = ("tool", "function")
# `call_1` and `functions.add:0` are counters: servers hand the same ones to everybody.
_RANDOM_TAIL: Final = re.compile(r"(?=[A-Za-z]*[0-9])(?=[0-9]*[A-Za-z])[A-Za-z0-9]{8,}\Z", re.ASCII)
_NOT_ALNUM: Final = re.compile(r"[^A-Za-z0-9]")
_THOUGHT_END: Final = "</think>"


def is_unique(tool_id: str) -> bool:
    """Whether a tool call's id is random enough to be handed out once.

    Its last run of letters and digits has eight characters, some of each.
    """
    return _RANDOM_TAIL.match(_NOT_ALNUM.split(tool_id)[-1]) is not None


class Conversation:
    """A hash chain over what was said and heard.

    `replies` are its prefixes up to and including each run of the assistant's messages that
    something followed, each with whether it holds a unique id; `results` are the ids of the
    tool results that came after the last.
    """

    def __init__(self) -> None:
        self.replies: list[tuple[bytes, bool]] = []
        self.results: list[str] = []
        self._state = bytes(SIZE)
        self._unique = False
        self._texts: list[str] = []
        self._calls: list[bytes] = []

    def heard(self, piece: bytes) -> None:
        """Somebody else said `piece`."""
        self._close()
        self._state = _digest(self._state + piece)

    def result(self, tool_id: Any, content: Any) -> None:
        """A tool's result came back."""
        name = tool_id if isinstance(tool_id, str) else ""
        if is_unique(name):
            self._unique = True
            self.heard(b"t" + _encoded(name))
        else:
            self.heard(b"t" + _encoded(name) + b"\0" + heard_bytes(content))
        self.results.append(name)

    def said(self, content: Any) -> None:
        """The assistant said `content`, text or parts; what is no text is left out."""
        for text in texts(content):
            spoken = text.rpartition(_THOUGHT_END)[2] if _THOUGHT_END in text else text
            if spoken := spoken.strip():
                self._texts.append(spoken)

    def called(self, tool_id: Any, name: Any, arguments: Any) -> None:
        """The assistant called a tool."""
        identifier = tool_id if isinstance(tool_id, str) else ""
        if is_unique(identifier):
            self._unique = True
            self._calls.append(_encoded(identifier))
        else:
            told = _encoded(f"{identifier}\0{name}\0")
            self._calls.append(told + canonical_arguments(arguments))

    def open_reply(self) -> tuple[bytes, bool] | None:
        """The prefix up to and including what the assistant said last, if nothing followed it."""
        if not (self._texts or self._calls):
            return None
        pieces = [_encoded("".join(self._texts)), *self._calls]
        lengths = ",".join([str(len(piece)) for piece in pieces])
        run = b"".join([self._state, b"a", lengths.encode(), b":", *pieces])
        return _digest(run), self._unique

    def _close(self) -> None:
        reply = self.open_reply()
        if reply is not None:
            self._state = reply[0]
            self.replies.append(reply)
            self.results = []
            self._texts, self._calls = [], []


def read_conversation(fields: dict[str, Any]) -> Conversation:
    """The conversation of a request in any of the APIs: its `messages` or its `input`."""
    conversation = Conversation()
    asked = fields.get("input")
    if isinstance(asked, str):
        conversation.heard(b"u" + _encoded(asked))
    for members in (fields.get("messages"), asked):
        for member in members if isinstance(members, list) else ():
            if isinstance(member, dict):
                _read_member(conversation, member)
    return conversation


def _read_member(conversation: Conversation, member: dict[str, Any]) -> None:
    """One message, or one item of a response's input."""
    kind, role = member.get("type"), member.get("role")
    if role == "assistant":
        conversation.said(member.get("content"))
        _read_calls(conversation, member)
    elif role in _TOOL_ROLES:
        conversation.result(member.get("tool_call_id"), member.get("content"))
    elif isinstance(role, str):
        if role not in _UNHEARD_ROLES:
            _read_heard(conversation, member.get("content"))
    elif kind == "function_call":
        conversation.called(member.get("call_id"), member.get("name"), member.get("arguments"))
    elif isinstance(kind, str) and kind.endswith("_output"):
        conversation.result(member.get("call_id"), member.get("output"))


def _read_calls(conversation: Conversation, message: dict[str, Any]) -> None:
    """The tool calls of an assistant's message, in a chat's form and in Anthropic's."""
    for call in objects(message.get("tool_calls")):
        function = call.get("function")
        function = function if isinstance(function, dict) else {}
        conversation.called(call.get("id"), function.get("name"), function.get("arguments"))
    for block in objects(message.get("content")):
        if block.get("type") == "tool_use":
            conversation.called(block.get("id"), block.get("name"), block.get("input"))


def _read_heard(conversation: Conversation, content: Any) -> None:
    """A user's message; Anthropic's tool results stand in one, among its other blocks."""
    others = content
    if isinstance(content, list):
        others = []
        for part in content:
            if isinstance(part, dict) and part.get("type") == "tool_result":
                conversation.result(part.get("tool_use_id"), part.get("content"))
            else:
                others.append(part)
    piece = heard_bytes(others)
    if piece:
        conversation.heard(b"u" + piece)


def heard_bytes(content: Any) -> bytes:
    """What a user or a tool said, as bytes: text as it is, anything else as sorted JSON."""
    if isinstance(content, str):
        return _encoded(content)
    if not isinstance(content, list):
        return b"" if content is None else b"\0" + _sorted_json(content)
    return b"".join([_part_bytes(part) for part in content])


def _part_bytes(part: Any) -> bytes:
    if isinstance(part, dict):
        if is_text(part):
            return _encoded(part["text"])
        part = {name: value for name, value in part.items() if name != "cache_control"}
    return b"\0" + _sorted_json(part)


def canonical_arguments(arguments: Any) -> bytes:
    """A tool call's arguments, whoever encoded them: parsed, keys sorted, 2.0 as 2.

    None and "" are no arguments, as {} is; text that is no JSON is itself.
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


def _sorted_json(value: Any) -> bytes:
    return msgspec.json.encode(value, order="sorted")


def _encoded(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _digest(data: bytes) -> bytes:
    state = blake2b(data[:_PIECE], digest_size=SIZE)
    for start in range(_PIECE, len(data), _PIECE):
        state.update(data[start : start + _PIECE])
    return state.digest()
