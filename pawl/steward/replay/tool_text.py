"""Read from a reply's own text whether the tool call in it could be executed (pure).

What a candidate answers to a prompt of token ids is raw text: no tool parser has read it. Calls in
JSON are recognised: between `<tool_call>` and `</tool_call>` (Hermes, Qwen), or as the whole text
(Llama). Replies in other syntaxes are not judged.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

BEGIN: Final = "<tool_call>"
END: Final = "</tool_call>"
# Keys under which a call has its arguments.
_ARGUMENTS: Final = ("arguments", "parameters")
_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}

# What a tool's arguments must be, by the tool's name: a JSON schema, or None for any object.
Tools = Mapping[str, Mapping[str, Any] | None]


def offered_tools(request: bytes | None) -> Tools:
    """Return the tools that a request of any wire format offers, by name."""
    tools = _object(request or b"{}").get("tools")
    schemas: dict[str, Mapping[str, Any] | None] = {}
    for tool in tools if isinstance(tools, list) else []:
        if not isinstance(tool, dict):
            continue
        function = tool.get("function")
        own = function if isinstance(function, dict) else tool
        schema = own.get("parameters", own.get("input_schema"))
        if isinstance(own.get("name"), str):
            schemas[own["name"]] = schema if isinstance(schema, dict) else None
    return schemas


def _object(text: str | bytes) -> dict[str, Any]:
    """Return a JSON object; what is none, or is nested too deep, as an empty one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def is_malformed(text: str, tools: Tools, *, is_whole: bool) -> bool | None:
    """Return whether a call in `text` cannot be executed; None: it has none that can be judged.

    A call must be JSON, of a tool that was offered, with the arguments that it requires, of the
    types that its schema names. What was cut off (not `is_whole`) in the middle of a call is not
    judged for that.
    """
    calls = _calls(text, is_whole=is_whole)
    if not tools or not calls:
        return None
    return not all(_fits(call, tools) for call in calls)


def _calls(text: str, *, is_whole: bool) -> list[str]:
    """Return the text of each call."""
    if BEGIN in text:
        _, *parts = text.split(BEGIN)
        closed = [part.partition(END) for part in parts]
        return [call for call, end, _ in closed if end or is_whole]
    stripped = text.strip().removeprefix("<|python_tag|>")
    looks_so = stripped.startswith("{") and '"name"' in stripped
    return [stripped] if looks_so and is_whole else []


def _fits(call: str, tools: Tools) -> bool:
    fields = _object(call)
    name = fields.get("name")
    if not isinstance(name, str) or name not in tools:
        return False
    arguments: object = next((fields[key] for key in _ARGUMENTS if key in fields), {})
    if not isinstance(arguments, dict):
        return False
    schema = tools[name] or {}
    required = schema.get("required")
    if isinstance(required, list) and not set(map(str, required)) <= arguments.keys():
        return False
    properties = schema.get("properties")
    types = properties if isinstance(properties, dict) else {}
    return all(_is_of(value, types.get(key)) for key, value in arguments.items())


def _is_of(value: object, schema: object) -> bool:
    """Return whether a value has the type that its schema names, if it names one that is known."""
    named = schema.get("type") if isinstance(schema, dict) else None
    kinds = _TYPES.get(named) if isinstance(named, str) else None
    if kinds is None:
        return True
    return isinstance(value, kinds) and (named == "boolean" or not isinstance(value, bool))
