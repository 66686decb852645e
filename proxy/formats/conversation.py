"""Bring a conversation into one form, in whichever of many ways a client sends it back (pure).

Clients rebuild what a server said: content as null, "" or a list of parts, arguments encoded anew,
reasoning left out or repeated, marks added, system prompts changed. What they keep is who said
what. So a conversation is read as three kinds of pieces: what the assistant said (a run of its
messages is one piece), what it heard, and the results of tools. System prompts are left out. A tool
call whose id is unique is represented by that id alone: its arguments and result add nothing to it.
The pieces are hashed as a chain, so that the digests of all prefixes of a thread cost one pass.
"""

import re
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any, Final

import msgspec

from proxy.formats.contents import blocks_of, objects

SIZE: Final = 16
# From 2048 bytes on hashlib releases the GIL: other threads would run, and this one would wait
# to get it back. So longer data is hashed in smaller pieces.
_PIECE: Final = 2000
# Data from this length on is read beside the event loop, which is to go on meanwhile.
_LONG: Final = 2**20
# `call_1` and `functions.add:0` are counters, which servers give to every client alike.
_RANDOM_TAIL: Final = re.compile(r"(?=[A-Za-z]*[0-9])(?=[0-9]*[A-Za-z])[A-Za-z0-9]{8,}\Z", re.ASCII)
_NOT_ALNUM: Final = re.compile(r"[^A-Za-z0-9]")
_THOUGHT_END: Final = "</think>"
_TEXT_TYPES: Final = ("text", "input_text", "output_text")


def is_unique(tool_id: str) -> bool:
    """Return whether a tool call's id is random enough to have been handed out only once.

    It is if its last run of letters and digits has at least eight characters, some of each kind.
    """
    return _RANDOM_TAIL.match(_NOT_ALNUM.split(tool_id)[-1]) is not None


class Conversation:
    """Compute a hash chain over the pieces of a conversation.

    `replies` holds a digest of each prefix that ends with a run of the assistant's messages which
    something followed, and whether that prefix contains a unique tool call id. `results` holds the
    ids of the tool results that came after the last of those replies.
    """

    def __init__(self) -> None:
        """Begin with an empty conversation."""
        self.replies: list[tuple[bytes, bool]] = []
        self.results: list[str] = []
        self._state = bytes(SIZE)
        self._unique = False
        self._texts: list[str] = []
        self._calls: list[bytes] = []

    def asked(self, content: Any) -> None:
        """Add what a user said: text, or a list of parts; nothing if it is empty."""
        piece = heard_bytes(content)
        if piece:
            self.heard(b"u", piece)

    def heard(self, kind: bytes, piece: bytes) -> None:
        """Add `piece`, which somebody other than the assistant said; `kind` tells who."""
        self._close()
        if len(piece) < _LONG:
            self._state = _digest(self._state + kind + piece)
        else:
            self._state = _digest_of_long(self._state + kind, piece)

    def result(self, tool_id: Any, content: Any) -> None:
        """Add a tool's result."""
        name = tool_id if isinstance(tool_id, str) else ""
        if is_unique(name):
            self._unique = True
            self.heard(b"t", _encoded(name))
        else:
            self.heard(b"t" + _encoded(name) + b"\0", heard_bytes(content))
        self.results.append(name)

    def said(self, content: Any) -> None:
        """Add what the assistant said: text or a list of parts, of which only texts count."""
        for text in texts(content):
            spoken = text.rpartition(_THOUGHT_END)[2] if _THOUGHT_END in text else text
            if spoken := spoken.strip():
                self._texts.append(spoken)

    def called(self, tool_id: Any, name: Any, arguments: Any) -> None:
        """Add a tool call of the assistant."""
        identifier = tool_id if isinstance(tool_id, str) else ""
        if is_unique(identifier):
            self._unique = True
            self._calls.append(_encoded(identifier))
        else:
            label = _encoded(f"{identifier}\0{name}\0")
            self._calls.append(label + canonical_arguments(arguments))

    def called_in(self, content: Any) -> None:
        """Add the tool calls among the blocks of what the assistant said."""
        for block in blocks_of(content, "tool_use"):
            self.called(block.get("id"), block.get("name"), block.get("input"))

    def took_turn(self, content: Any) -> None:
        """Add a user's turn: the tool results among its blocks, and then the rest."""
        if not isinstance(content, list):
            self.asked(content)
            return
        others = []
        for part in content:
            if isinstance(part, dict) and part.get("type") == "tool_result":
                self.result(part.get("tool_use_id"), part.get("content"))
            else:
                others.append(part)
        self.asked(others)

    def open_reply(self) -> tuple[bytes, bool] | None:
        """Return the prefix that ends with the assistant's last words, if nothing followed them.

        Returns:
            Its digest and whether it contains a unique tool call id; None if there is none.
        """
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


def is_text(part: dict[str, Any]) -> bool:
    """Return whether a part of a content is a text."""
    return part.get("type") in _TEXT_TYPES and isinstance(part.get("text"), str)


def texts(content: Any) -> Iterable[str]:
    """Return the texts of a content, which is a string or a list of parts."""
    if isinstance(content, str):
        return (content,)
    return (part["text"] for part in objects(content) if is_text(part))


def heard_bytes(content: Any) -> bytes:
    """Return a user's or a tool's content as bytes: text as it is, anything else as sorted JSON."""
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
    """Return a tool call's arguments in one form, whoever encoded them: keys sorted, 2.0 as 2.

    None and "" mean no arguments, as {} does. Text that is not JSON is returned as it is.
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


def _digest_of_long(begin: bytes, data: bytes) -> bytes:
    """Return the digest of `begin` and `data` without a copy of either, and without the GIL."""
    state = blake2b(begin, digest_size=SIZE)
    state.update(data)
    return state.digest()
