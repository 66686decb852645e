"""Take JSON apart at its top level, and take members out of what is no JSON (pure).

Values stay bytes until somebody needs them, and so leave as they came.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec

from store.values.documents import nests_too_deep

# The top level of a JSON object; its values stay bytes until somebody needs them.
Object = dict[str, msgspec.Raw]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
# Errors of a parser for bytes that are not JSON, not UTF-8, or nested too deep.
UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
# Errors of reading JSON that is not of an API's shape.
ODD_SHAPE: Final = (*UNREADABLE, KeyError, TypeError, AttributeError, ValueError)
NULL: Final = msgspec.Raw(b"null")

_object: Final = msgspec.json.Decoder(Object)


def parse_object(body: bytes) -> Object | None:
    """Return a JSON object's top level with values unparsed, or None if it cannot be read as one.

    Keys keep their order and values their exact bytes, so that what is not touched leaves as it
    came.
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
    """Return a JSON object with all its values, or None if Python cannot represent or nest it.

    `parse_object` accepts more: it leaves values unparsed, so that a lone surrogate or 1e400 passes
    through. Reading for the ledger must not fail a reply that was passed on.
    """
    if nests_too_deep(bytes(payload)):
        # The object is walked and encoded again later, which is recursive too.
        return None
    try:
        return msgspec.json.decode(payload, type=dict[str, Any])
    except UNREADABLE:
        return None


def string_or_none(value: object) -> str | None:
    """Return `value` if it is a string, else None."""
    return value if isinstance(value, str) else None


# How values begin.
ARRAY: Final = b"["
OBJECT: Final = b"{"
STRING: Final = b'"'
NUMBER: Final = b"-0123456789"
# A string that is cut off reaches to the end of the data.
_STRING: Final = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)'
_BRACKET: Final = re.compile(_STRING + rb"|[{}\[\]]", re.DOTALL)
_SCALAR: Final = re.compile(_STRING + rb"|[^,\]}\s]*", re.DOTALL)
_NO_CONTENT: Final = re.compile(rb"\[\s*\]")


class Replacement(msgspec.Struct, frozen=True):
    """Name a member to replace by `instead`, where its value begins with one of the bytes `opens`.

    With `only`, just a value equal to that is replaced; with `unless_empty`, no empty list.
    """

    opens: bytes
    instead: bytes = b"null"
    only: bytes | None = None
    unless_empty: bool = False


def without(data: bytes, members: Mapping[bytes, Replacement]) -> bytes:
    """Return `data` with the values of `members` replaced, and every other byte unchanged.

    This is for what cannot be parsed, or is not of the API's shape: a lone surrogate, NaN, bytes
    that are not UTF-8, an object that is cut off or has something beside it. A client must get such
    bytes as they came, without what it did not ask for. So members are found by their names,
    wherever they stand: in such a reply nobody can tell for sure which object a member belongs to.
    A model's text is never touched, because the quotes of a name within a string are escaped.
    """
    if not any(name in data for name in members):
        return data
    key = re.compile(rb'"(%b)"\s*:\s*' % b"|".join(map(re.escape, members)))
    pieces, kept, at = [], 0, 0
    while (match := key.search(data, at)) is not None:
        at = match.end()
        member = members[match[1]]
        end = _end_of(data, at, member)
        if end is not None:
            pieces += [data[kept:at], member.instead]
            kept = at = end
    return b"".join([*pieces, data[kept:]]) if pieces else data


def _end_of(data: bytes, at: int, member: Replacement) -> int | None:
    """Return where a member's value ends, or None if it is not to be replaced."""
    sign = data[at : at + 1]
    if not sign or sign not in member.opens:
        return None
    if sign in ARRAY + OBJECT:
        empty = member.unless_empty and _NO_CONTENT.match(data, at) is not None
        return None if empty else _end_of_container(data, at)
    match = _SCALAR.match(data, at)
    end = len(data) if match is None else match.end()
    return end if member.only is None or data[at:end] == member.only else None


def _end_of_container(data: bytes, at: int) -> int:
    """Return where a container's closing bracket ends, or the data's end if it is cut off."""
    depth = 0
    while (token := _BRACKET.search(data, at)) is not None:
        at = token.end()
        sign = token[0]
        if not sign.startswith(b'"'):
            depth += 1 if sign in ARRAY + OBJECT else -1
        if depth == 0:
            return at
    return len(data)
