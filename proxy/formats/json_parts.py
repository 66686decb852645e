"""Read parts of JSON for a wire format: values stay bytes until somebody needs them (pure)."""

from typing import Any, Final

import msgspec

from store.values.json_limits import nests_too_deep

Object = dict[str, msgspec.Raw]
# Errors of a parser for bytes that are not JSON, not UTF-8, or nested too deep.
UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
NULL: Final = msgspec.Raw(b"null")

_objects: Final = msgspec.json.Decoder(Object)


def parse_object(body: bytes) -> Object | None:
    """Return a JSON object's top level with values unparsed, or None if it cannot be read as one.

    Keys keep their order and values their exact bytes, so that what is not touched leaves as it
    came.
    """
    try:
        if not body.isascii():
            body.decode()
        return _objects.decode(body)
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
