"""Replace fields of a JSON document by their path, and take token ids out of it (pure).

Values that are not on the path stay bytes, so that numbers of any size stay as they were written.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

ANY: Final = "*"
NULL: Final = b"null"
# Members that hold token ids, or tokens with their log-probabilities: both spell the text out.
SPELLING: Final = frozenset(
    {"token_ids", "prompt_token_ids", "logprobs", "prompt_logprobs", "top_logprobs"}
)
# The prompt of a completion may be one text, several, or token ids.
PROMPT: Final = "prompt"

_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_items = msgspec.json.Decoder(list[msgspec.Raw])


def with_field(value: bytes, path: Sequence[str], instead: bytes) -> bytes:
    """Return a JSON value in which what `path` leads to is replaced by the JSON `instead`.

    A part of the path is the name of a member, the index of an item, or `*` for all of either.
    Where it leads to nothing or null, nothing changes, and the result is `value` itself.
    """
    if not path:
        return value if value.strip() in (NULL, instead) else instead
    name, rest = path[0], path[1:]
    opening = value.lstrip()[:1]
    if opening == b"{":
        members = _members.decode(value)
        names = list(members) if name == ANY else [name] if name in members else []
        replaced = {one: with_field(bytes(members[one]), rest, instead) for one in names}
        if all(replaced[one] == bytes(members[one]) for one in names):
            return value
        return msgspec.json.encode(members | {k: msgspec.Raw(v) for k, v in replaced.items()})
    if opening == b"[":
        items = [bytes(item) for item in _items.decode(value)]
        changed = [
            with_field(item, rest, instead) if name in (ANY, str(at)) else item
            for at, item in enumerate(items)
        ]
        return value if changed == items else msgspec.json.encode(list(map(msgspec.Raw, changed)))
    return value


def without_ids(value: bytes) -> bytes:
    """Return a JSON value without token ids, and without log-probabilities of tokens, anywhere."""
    opening = value.lstrip()[:1]
    if opening == b"{":
        members = {name: bytes(raw) for name, raw in _members.decode(value).items()}
        kept = {
            name: msgspec.Raw(without_ids(raw))
            for name, raw in members.items()
            if not _spells(name, raw)
        }
        return msgspec.json.encode(kept)
    if opening == b"[" and b"{" in value:
        return msgspec.json.encode(
            [msgspec.Raw(without_ids(bytes(item))) for item in _items.decode(value)]
        )
    return value


def _spells(name: str, raw: bytes) -> bool:
    """Return whether a member spells a text out in tokens; `logprobs: true` does not."""
    if raw.lstrip()[:1] not in (b"{", b"["):
        return False
    return name in SPELLING or (name == PROMPT and b'"' not in raw)
