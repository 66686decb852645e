"""Find the grammar that a request holds its reply to, as vLLM makes it of the fields (pure).

Only what vLLM does in the same way whatever it was started with is read: exactly one constraint,
and no tools beside a form, since some servers then allow both. A forced call is held to a JSON
schema of the tools by servers whose tool parser reads JSON (`vllm/tool_parsers/utils.py`). Others
have a syntax of their own. Where it is known (`proxy.formats.tool_parsers`), a structural tag of it
is read; where not, replies do not fit the schema, and the trainer sees that.

Sources: vLLM's `entrypoints/generate/base/protocol.py`, `tool_parsers/abstract_tool_parser.py`,
`tool_parsers/structural_tag_registry.py` and `parser/abstract_parser.py`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from proxy.formats.sampling import free_form
from store.values.tool_tags import Choice, OfferedTool, ToolTag, text_of

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
    tag: str | None = None,
) -> Recorded | None:
    """Return the grammar of a request that has one constraint which can be read, else None.

    Args:
        fields: the request.
        form: the form that it asks for, wherever its format has it.
        read_form: reads it, if it is not plain text.
        forced: the call that its `tool_choice` forces, as `of_forced_call` takes it.
        functions: its tools, likewise.
        tag: the syntax that the server holds calls to, if it is known.
    """
    own = fields.get("structured_outputs")
    constraints = [] if own is None else [of_structured_outputs(own)]
    constraints += [] if free_form(form) else [read_form(form)]
    offered = bool(fields.get("tools")) and fields.get("tool_choice") != "none"
    if forced is None and not offered:
        return constraints[0] if len(constraints) == 1 else None
    single = fields.get("parallel_tool_calls")
    if constraints or not functions or not _is_flag(single) or not _have_own_names(functions):
        return None
    if tag is not None:
        return of_tag(tag, fields, forced, functions)
    return None if forced is None else of_forced_call(forced, functions, single=single is False)


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
    forced: Recorded, functions: Sequence[Fields], *, single: bool
) -> Recorded | None:
    """Return the grammar of a `tool_choice` that forces a call, of a tool or of any, as JSON.

    Args:
        forced: `ANY_CALL`, or the name of the one function.
        functions: all tools, each with its name and parameters.
        single: whether there may be one call at most.
    """
    if forced is ANY_CALL:
        return _any_call(functions, single=single)
    named = {function["name"]: function.get("parameters") for function in functions}
    name = forced.get("name")
    return _schema(named[name] or NO_PARAMETERS) if name in named else None


def of_tag(
    model: str, fields: Fields, forced: Recorded | None, functions: Sequence[Fields]
) -> Recorded | None:
    """Return the structural tag of a request with tools, or None if vLLM makes none.

    It holds what is outside of the arguments for all tools, and the arguments of strict ones.
    """
    if not all(_is_flag(function.get("strict")) for function in functions):
        return None
    one_call = fields.get("parallel_tool_calls") is False
    choice: Choice = "forced"
    if forced is None:
        # Where the choice is null, or an object, vLLM makes no tag.
        held = one_call or any(function.get("strict") for function in functions)
        if not held or fields.get("tool_choice", "auto") != "auto":
            return None
        choice = "auto"
    elif forced is ANY_CALL:
        choice = "required"
    else:
        functions = [one for one in functions if one["name"] == forced.get("name")]
        if not functions:
            return None
    tools = tuple(map(_offered, functions))
    tag = ToolTag(model=model, choice=choice, tools=tools, one_call=one_call)
    return {"kind": "tools", "text": text_of(tag)}


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


def _is_flag(value: Any) -> bool:
    """Return whether a flag is what it seems: vLLM takes 0 and "no" for false, too."""
    return isinstance(value, bool | None)


def _have_own_names(functions: Sequence[Fields]) -> bool:
    return len({function["name"] for function in functions}) == len(functions)


def _offered(function: Fields) -> OfferedTool:
    parameters = function.get("parameters") if function.get("strict") else None
    return OfferedTool(name=function["name"], parameters=parameters)


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
