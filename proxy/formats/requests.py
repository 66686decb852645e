"""Take JSON apart at its top level: requests as clients sent them, and parts of replies (pure).

Values stay bytes until somebody needs them, and so leave as they came. What the upstream needs is
put into a request beside them.
"""

from typing import Any, Final

import msgspec

from proxy.formats.base import ModelRequest, Object
from store.values.json_limits import nests_too_deep

# Errors of a parser for bytes that are not JSON, not UTF-8, or nested too deep.
UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
NULL: Final = msgspec.Raw(b"null")

_objects: Final = msgspec.json.Decoder(Object)


def read_request(body: bytes, *, checked: bool = False) -> ModelRequest:
    """Parse a request as the client sent it.

    A body that is not a JSON object is kept as it is: the upstream says what is wrong with it. So
    is one that nests too deep to be parsed.

    Args:
        body: the request's body.
        checked: the body is known not to nest too deep.
    """
    return request_of(body, parse_object(body) if checked or not nests_too_deep(body) else None)


def request_of(body: bytes, parsed: Object | None) -> ModelRequest:
    """Return the request with this body, of which `parsed` holds the fields that are to be read."""
    if parsed is None:
        return ModelRequest(body=body)
    fields = {name: readable_value(raw) for name, raw in parsed.items()}
    model = fields.get("model")
    return ModelRequest(
        body=body,
        parsed=parsed,
        fields=fields,
        model=model if isinstance(model, str) else None,
        stream=fields.get("stream") is True,
    )


def with_changes(request: ModelRequest, served_name: str | None, added: Object) -> ModelRequest:
    """Return `request` under the version's name and with `added` fields, all else byte for byte."""
    if request.parsed is None:
        return request
    changes: Object = {}
    if served_name is not None and served_name != request.model:
        changes["model"] = msgspec.Raw(msgspec.json.encode(served_name))
    changes |= added
    if not changes:
        return request
    body = msgspec.json.encode(request.parsed | changes)
    return msgspec.structs.replace(request, body=body, injected=frozenset(added))


def own_name(request: ModelRequest, served_name: str | None) -> msgspec.Raw | None:
    """Return the model's name to put back into a reply, or None if it was not changed."""
    if served_name is None or request.model is None or served_name == request.model:
        return None
    return msgspec.Raw(msgspec.json.encode(request.model))


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
