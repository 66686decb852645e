"""Find the grammar that a request holds its reply to, as vLLM makes it of the fields (pure).

Only what vLLM does in the same way whatever it was started with is read: exactly one constraint,
and no tools beside a form, since some servers then allow both. A forced call is held to a JSON
schema of the tools by servers whose tool parser reads JSON (`vllm/tool_parsers/utils.py`); others
have a syntax of their own, whose replies do not fit the schema, and the trainer sees that.

Sources: vLLM's `entrypoints/generate/base/protocol.py` and `tool_parsers/abstract_tool_parser.py`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from proxy.formats.sampling import free_form

Fields = Mapping[str, Any]
# What a grammar is recorded as (`store.values.grammars`).
Recorded = dict[str, str]

OBJECT: Final[Recorded] = {"kind": "json", "text": '{"type": "object"}'}
# What a `tool_choice` forces: a call of any tool, or one that cannot be read; else a name.
ANY_CALL: Final[Recorded] = {"type": "required"}
UNREAD: Final[Recorded] = {}
# Options of `structured_outputs` that change nothing if they are false or missing.
OPTIONS: Final = (
    *("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"),
)
NO_PARAMETERS: Final[Fields] = {"type": "object", "properties": {}}


def the_grammar(
    fields: Fields,
    form: Any,
    read_form: Callable[[Any], Recorded | None],
    forced: Recorded | None = None,
    functions: Sequence[Fields] | None = None,
) -> Recorded | None:
    """Return the grammar of a request that has one constraint which can be read, else None.

    Args:
        fields: the request.
        form: the form that it asks for, wherever its format has it.
        read_form: reads it, if it is not plain text.
        forced: the call that its `tool_choice` forces, as `of_forced_call` takes it.
        functions: its tools, likewise.
    """
    own = fields.get("structured_outputs")
    constraints = [] if own is None else [of_structured_outputs(own)]
    constraints += [] if free_form(form) else [read_form(form)]
    if forced is not None:
        single = fields.get("parallel_tool_calls")
        return None if constraints else of_forced_call(forced, functions, single)
    offered = bool(fields.get("tools")) and fields.get("tool_choice") != "none"
    return None if offered or len(constraints) != 1 else constraints[0]


def of_structured_outputs(value: Any) -> Recorded | None:
    """Return the grammar of vLLM's own field, `structured_outputs`."""
    if not isinstance(value, dict):
        return None
    given = [(n, v) for n, v in value.items() if v is not None and (n not in OPTIONS or v)]
    kind, constraint = given[0] if len(given) == 1 else (None, None)
    match kind, constraint:
        case "json", dict():
            return _schema(constraint)
        case "json" | "regex" | "grammar", str() if constraint:
            return {"kind": kind, "text": constraint}
        case "json_object", True:
            return OBJECT
        case "choice", list() if constraint and all(isinstance(one, str) for one in constraint):
            return {"kind": "choice", "text": json.dumps(constraint)}
        case _:
            return None


def of_form(form: Any) -> Recorded | None:
    """Return the grammar of a chat's or a completion's `response_format`."""
    if not isinstance(form, dict):
        return None
    if form.get("type") == "json_object":
        return OBJECT
    named = form.get("json_schema")
    if form.get("type") != "json_schema" or not isinstance(named, dict):
        return None
    return _schema(named.get("schema"))


def of_text_form(form: Any) -> Recorded | None:
    """Return the grammar of a response's `text.format`, which has its schema in itself."""
    if isinstance(form, dict) and form.get("type") == "json_schema":
        return _schema(form.get("schema"))
    return OBJECT if isinstance(form, dict) and form.get("type") == "json_object" else None


def of_forced_call(
    forced: Recorded, functions: Sequence[Fields] | None, single: Any
) -> Recorded | None:
    """Return the grammar of a `tool_choice` that forces a call, of a tool or of any.

    Args:
        forced: `ANY_CALL`, or the name of the one function.
        functions: all tools, each with its name and parameters; None if one is no function.
        single: `parallel_tool_calls`.
    """
    if not functions or single not in (None, True, False):
        return None
    named = {function["name"]: function.get("parameters") for function in functions}
    if len(named) < len(functions):
        return None
    if forced is ANY_CALL:
        return _any_call(functions, single=single is False)
    name = forced.get("name")
    return _schema(named[name] or NO_PARAMETERS) if name in named else None


def forced_by(choice: Any, named: Any) -> Recorded:
    """Return what a `tool_choice` that is not free forces.

    `named` is the part of it that names a function.
    """
    if choice == "required":
        return ANY_CALL
    is_function = isinstance(choice, dict) and choice.get("type") == "function"
    name = named.get("name") if is_function and isinstance(named, dict) else None
    return {"name": name} if isinstance(name, str) else UNREAD


def functions_of(tools: Any) -> list[Fields] | None:
    """Return the functions that `tools` holds, or None if they are not all well-formed ones."""
    if not isinstance(tools, list) or not all(map(_is_function, tools)):
        return None
    return tools


def _is_function(tool: Any) -> bool:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        return False
    return isinstance(tool.get("parameters"), dict | None)


def _schema(schema: Any) -> Recorded | None:
    # vLLM writes a schema down in the same way.
    return {"kind": "json", "text": json.dumps(schema)} if isinstance(schema, dict) else None


def _any_call(functions: Sequence[Fields], *, single: bool) -> Recorded | None:
    """Return the schema of a list of calls; vLLM gathers the tools' definitions at its top."""
    definitions: dict[str, Any] = {}
    for function in functions:
        own = (function.get("parameters") or {}).get("$defs", {})
        if not isinstance(own, dict) or any(definitions.get(n, d) != d for n, d in own.items()):
            return None
        definitions |= own
    items = {"type": "object", "anyOf": [_call(function) for function in functions]}
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": items}
    if single:
        schema["maxItems"] = 1
    return _schema(schema | ({"$defs": definitions} if definitions else {}))


def _call(function: Fields) -> Fields:
    schema = function.get("parameters")
    own = {n: part for n, part in schema.items() if n != "$defs"} if schema else NO_PARAMETERS
    return {
        "properties": {"name": {"type": "string", "enum": [function["name"]]}, "parameters": own},
        "required": ["name", "parameters"],
    }
