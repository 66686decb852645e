"""Parse only the top level of JSON, and remove members from unparseable bytes (pure).

Values stay bytes, so that untouched values are forwarded unchanged.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec

from store.values.documents import nests_too_deep

# The top level of a JSON object, with values unparsed.
Object = dict[str, msgspec.Raw]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
# Errors raised for bytes that are not JSON, not UTF-8, or nested too deep.
UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
# Errors raised for JSON without the API's shape.
ODD_SHAPE: Final = (*UNREADABLE, KeyError, TypeError, AttributeError, ValueError)
NULL: Final = msgspec.Raw(b"null")

_object: Final = msgspec.json.Decoder(Object)


def parse_object(body: bytes) -> Object | None:
    """Return a JSON object's top level with values unparsed, or None if `body` is not one.

    Keys keep their order and values their bytes, so that untouched fields are forwarded unchanged.
    """
    try:
        if not body.isascii():
            body.decode()
        return _object.decode(body)
    except UNREADABLE:
        return None


def value_of(raw: msgspec.Raw | None) -> Any:
    """Return the parsed value of a field, or None if the field is absent."""
    return None if raw is None else msgspec.json.decode(raw)


def readable_value(raw: msgspec.Raw) -> Any:
    """Return the parsed value, or its JSON text if Python cannot represent it (such as 1e400)."""
    try:
        return msgspec.json.decode(raw)
    except UNREADABLE:
        return bytes(raw).decode()


def decoded_object(payload: bytes | msgspec.Raw) -> dict[str, Any] | None:
    """Return a JSON object with all its values, or None if Python cannot represent it.

    Return None, too, if the object nests too deep: reading a reply to record it must not raise
    after the reply was forwarded. `parse_object` accepts more: it leaves values unparsed, so that a
    lone surrogate or 1e400 passes through.
    """
    if nests_too_deep(bytes(payload)):
        # The object is walked and encoded again later, which is recursive too.
        return None
    try:
        return msgspec.json.decode(payload, type=dict[str, Any])
    except UNREADABLE:
        return None


def string_or_none(value: object) -> str | None:
    return value if isinstance(value, str) else None


# First bytes of values, by type.
ARRAY: Final = b"["
OBJECT: Final = b"{"
STRING: Final = b'"'
NUMBER: Final = b"-0123456789"
# A string that is cut off reaches to the end of the data.
_STRING: Final = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)'
_STRING_OR_BRACKET: Final = re.compile(_STRING + rb"|[{}\[\]]", re.DOTALL)
_STRING_OR_WORD: Final = re.compile(_STRING + rb"|[^,\]}\s]*", re.DOTALL)
_EMPTY_LIST: Final = re.compile(rb"\[\s*\]")


class Replacement(msgspec.Struct, frozen=True):
    """Rule to replace a member's value by `instead` if it begins with one of the bytes `opens`.

    `only` restricts the rule to one exact value; `unless_empty` exempts empty lists.
    """

    opens: bytes
    instead: bytes = b"null"
    only: bytes | None = None
    unless_empty: bool = False


def replace_members(data: bytes, members: Mapping[bytes, Replacement]) -> bytes:
    """Return `data` with the values of `members` replaced, and every other byte unchanged.

    This is for data that cannot be parsed or lacks the API's shape: a lone surrogate, NaN, bytes
    that are not UTF-8, an object that is cut off or followed by more. Clients must get such data as
    it came, except for members they did not ask for. Members are found by name at any depth: the
    object that a member belongs to cannot be determined reliably. A model's text is never touched,
    because quotes within a string are escaped.
    """
    if not any(name in data for name in members):
        return data
    key = re.compile(rb'"(%b)"\s*:\s*' % b"|".join(map(re.escape, members)))
    pieces, kept, at = [], 0, 0
    while (match := key.search(data, at)) is not None:
        at = match.end()
        member = members[match[1]]
        end = _end_of_value(data, at, member)
        if end is not None:
            pieces += [data[kept:at], member.instead]
            kept = at = end
    return b"".join([*pieces, data[kept:]]) if pieces else data


def _end_of_value(data: bytes, at: int, member: Replacement) -> int | None:
    """Return the end of the value at `at`, or None if the rule `member` does not apply to it."""
    first_byte = data[at : at + 1]
    if not first_byte or first_byte not in member.opens:
        return None
    if first_byte in ARRAY + OBJECT:
        empty = member.unless_empty and _EMPTY_LIST.match(data, at) is not None
        return None if empty else _end_of_container(data, at)
    match = _STRING_OR_WORD.match(data, at)
    end = len(data) if match is None else match.end()
    return end if member.only is None or data[at:end] == member.only else None


def _end_of_container(data: bytes, at: int) -> int:
    """Return the end of the list or object at `at`, or the data's end if it is cut off."""
    depth = 0
    while (token := _STRING_OR_BRACKET.search(data, at)) is not None:
        at = token.end()
        bracket_or_string = token[0]
        if not bracket_or_string.startswith(b'"'):
            depth += 1 if bracket_or_string in ARRAY + OBJECT else -1
        if depth == 0:
            return at
    return len(data)
