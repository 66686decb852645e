"""Read requests as clients sent them, and put in what the upstream needs (pure)."""

import msgspec

from proxy.formats.base import ModelRequest
from proxy.formats.json_parts import Object, parse_object, readable_value
from store.values.json_limits import nests_too_deep


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
