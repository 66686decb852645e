"""Make the request of an exploring call, the client's but for what is changed (pure)."""

from collections.abc import Mapping
from typing import Final

import msgspec

from proxy.formats.base import ModelRequest
from proxy.formats.raw_json import Object, parse_object, readable_value

Changes = Mapping[str, float | None]

# Names no field of a request, but one of its tools.
STRICT: Final = "strict"
TOOLS: Final = "tools"
FUNCTION: Final = "function"

_list: Final = msgspec.json.Decoder(list[msgspec.Raw])


def with_explored(request: ModelRequest, changes: Changes) -> ModelRequest:
    """Return a request with `changes`; all other values keep their bytes, and the order is kept."""
    if request.parsed is None:
        return request
    parsed, fields = dict(request.parsed), dict(request.fields)
    for change, value in changes.items():
        name = TOOLS if change == STRICT else change
        if name == TOOLS:
            parsed[name] = _none_strict(parsed[name])
        elif value is not None:
            parsed[name] = msgspec.Raw(msgspec.json.encode(value))
        else:
            parsed.pop(name, None)
        fields.pop(name, None)
        if name in parsed:
            fields[name] = readable_value(parsed[name])
    body = msgspec.json.encode(parsed)
    return msgspec.structs.replace(request, body=body, parsed=parsed, fields=fields)


def _none_strict(tools: msgspec.Raw) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode([_not_strict(tool) for tool in _list.decode(tools)]))


def _not_strict(tool: msgspec.Raw) -> msgspec.Raw | Object:
    """Return a tool without `strict`, in itself and in its function; others keep their bytes."""
    parsed = parse_object(bytes(tool))
    if parsed is None:
        return tool
    function = parsed.get(FUNCTION)
    inner = None if function is None else parse_object(bytes(function))
    if inner is not None and _is_strict(inner):
        del inner[STRICT]
        parsed[FUNCTION] = msgspec.Raw(msgspec.json.encode(inner))
    elif not _is_strict(parsed):
        return tool
    if _is_strict(parsed):
        del parsed[STRICT]
    return parsed


def _is_strict(holder: Object) -> bool:
    return STRICT in holder and readable_value(holder[STRICT]) not in (None, False)
