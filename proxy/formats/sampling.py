"""Read how a reply is sampled: the settings, and the grammar that constrains it (pure).

`SamplingRules` separates the request fields that affect sampling from those that do not; each wire
format has a subclass. Settings that model servers understand in every format are in
`proxy.trainable`.

A grammar is derived from the fields as vLLM derives it, and only where vLLM's start options make no
difference: exactly one constraint, and no tools beside a response format, since some servers then
allow calls as well as formatted text. Servers whose tool parser reads JSON constrain a forced call
to a JSON schema of the tools (`vllm/tool_parsers/utils.py`). Other parsers have their own syntax.
If that is known (`TAGS`), the grammar is a structural tag; if not, it is the JSON schema: replies
do not fit it, and the trainer detects that.

Sources: vLLM's `entrypoints/generate/base/protocol.py`, `tool_parsers/abstract_tool_parser.py`,
`tool_parsers/structural_tag_registry.py` and `parser/abstract_parser.py`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from store.values.grammars import Choice, OfferedTool, ToolTag, text_of_tag

Fields = Mapping[str, Any]
# A grammar as it is recorded (`store.values.grammars`).
RecordedGrammar = dict[str, str]
# A call that a `tool_choice` forces (see `forced_call`).
ForcedCall = dict[str, str]

# The forms of `tool_choice`, in all APIs, that constrain nothing.
FREE_TOOL_CHOICES: Final = (None, "auto", "none", {"type": "auto"}, {"type": "none"})
# vLLM's request fields for output, storage, caching, queueing, the prompt and stops. They do not
# change the distribution: the recorded ids include the prompt, and a stop only ends the sampling.
HARMLESS_VLLM_FIELDS: Final = frozenset(
    {
        *("model", "stream", "user", "session_id", "request_id", "priority", "cache_salt"),
        *("ignore_eos", "include_stop_str_in_output", "repetition_detection"),
        *("skip_special_tokens", "spaces_between_special_tokens", "stream_interval"),
        *("kv_transfer_params", "ec_transfer_params", "mm_payload", "return_mm_kwargs"),
        *("return_token_ids", "return_tokens_as_token_ids", "return_token_offsets"),
        *("routed_experts_prompt_start", "truncate_prompt_tokens", "truncation_side"),
        *("add_special_tokens", "prompt_logprobs", "logprob_token_ids", "length_penalty"),
        *("chat_template", "chat_template_kwargs", "documents", "include_reasoning"),
        *("media_io_kwargs", "mm_processor_kwargs"),
    }
)
# Fields that agent programs (`proxy.identity.identify`) and litellm add to those of an API.
HARMLESS_CLIENT_FIELDS: Final = frozenset(
    {"metadata", "conversation", "client_metadata", "litellm_session_id", "litellm_trace_id"}
)
HARMLESS_FIELDS: Final = (
    HARMLESS_VLLM_FIELDS
    | HARMLESS_CLIENT_FIELDS
    | {"tools", "stream_options", "parallel_tool_calls"}
)


class SamplingRules:
    """Rules for the sampling fields of one format; the base class is for formats that add none."""

    # The format's own settings, which are recorded.
    settings: frozenset[str] = frozenset()
    # Settings that must be objects, or else make a call untrainable.
    objects: tuple[str, ...] = ()
    # Fields that do not change the distribution; an unknown field makes a call untrainable.
    harmless: frozenset[str] = HARMLESS_FIELDS

    def prevents_replay(self, settings: Fields) -> bool:
        """Return whether a setting of the format makes the distribution impossible to replay."""
        return False

    def constrains(self, settings: Fields) -> bool:
        """Return whether one of the format's settings excludes tokens from sampling."""
        return not is_free_choice(settings.get("tool_choice"))

    def tools(self, fields: Fields) -> Any:
        """Return the tools that the model may call, in the format's own form."""
        return fields.get("tools")

    def grammar(self, fields: Fields, tag: str | None) -> Mapping[str, str] | None:
        """Return the grammar that a request imposes on its reply, in its recorded form.

        None if there is none, or if servers may interpret the fields differently. Called only if
        something may constrain the reply. `tag` names the server's syntax of tool calls (a value of
        `TAGS`), if known.
        """
        return None


def is_free_choice(choice: Any) -> bool:
    """Return whether a `tool_choice` constrains nothing: it is absent, `auto` or `none`."""
    if isinstance(choice, dict):
        # `proxy.trainable` checks the limit on calls in a reply, for all choices.
        choice = {n: v for n, v in choice.items() if n != "disable_parallel_tool_use"}
    return choice in FREE_TOOL_CHOICES


def is_free_form(form: Any) -> bool:
    """Return whether the response format is absent or plain text."""
    return form is None or (isinstance(form, dict) and form.get("type") == "text")


def has_free_form(holder: Any) -> bool:
    """Return whether the member `format` of a setting is absent or plain text."""
    return not isinstance(holder, dict) or is_free_form(holder.get("format"))


def limits_thinking(settings: Mapping[str, Any]) -> bool:
    """Return whether thinking has a token budget; at its limit, the end is forced, not sampled."""
    thinking = settings.get("thinking")
    return isinstance(thinking, dict) and thinking.get("budget_tokens") is not None


# The grammar of any JSON object.
ANY_OBJECT: Final[RecordedGrammar] = {"kind": "json", "text": '{"type": "object"}'}
# Forced calls: of any tool, or unreadable; a call of one tool is `{"name": …}`.
ANY_CALL: Final[ForcedCall] = {"type": "required"}
UNREADABLE_CALL: Final[ForcedCall] = {}
# Options of `structured_outputs` that change nothing if they are false or missing.
OPTION_NAMES: Final = (
    *("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"),
)
NO_PARAMETERS: Final[Fields] = {"type": "object", "properties": {}}


def grammar_of(
    fields: Fields,
    form: Any,
    forced: ForcedCall | None = None,
    functions: Sequence[Fields] | None = None,
    tag: str | None = None,
    *,
    flat: bool = False,
) -> RecordedGrammar | None:
    """Return a request's grammar if it has exactly one readable constraint, else None.

    Args:
        fields: the request.
        form: its response format, wherever the wire format has it.
        forced: the call that its `tool_choice` forces (see `forced_call`), if any.
        functions: its tools, each with name and parameters; None if one is malformed.
        tag: the name of the server's syntax of tool calls, if known.
        flat: `form` holds its schema directly (Responses API), not in `json_schema`.
    """
    own = fields.get("structured_outputs")
    constraints = [] if own is None else [_structured_outputs_grammar(own)]
    constraints += [] if is_free_form(form) else [_response_format_grammar(form, flat=flat)]
    offered = bool(fields.get("tools")) and fields.get("tool_choice") != "none"
    if forced is None and not offered:
        return constraints[0] if len(constraints) == 1 else None
    single = fields.get("parallel_tool_calls")
    if constraints or not functions or not _is_flag(single):
        return None
    if len({function["name"] for function in functions}) != len(functions):
        return None
    if tag is not None:
        return _tag_grammar(tag, fields, forced, functions)
    return (
        None if forced is None else _forced_call_grammar(forced, functions, single=single is False)
    )


def _structured_outputs_grammar(value: Any) -> RecordedGrammar | None:
    """Return the grammar in vLLM's own field `structured_outputs`, or None if unreadable."""
    if not isinstance(value, dict):
        return None
    given = [(n, v) for n, v in value.items() if v is not None and (n not in OPTION_NAMES or v)]
    kind, constraint = given[0] if len(given) == 1 else (None, None)
    match kind, constraint:
        case "json", dict():
            return _schema_grammar(constraint)
        case "json" | "regex" | "grammar", str() if constraint:
            return {"kind": kind, "text": constraint}
        case "json_object", True:
            return ANY_OBJECT
        case "choice", list() if constraint and all(isinstance(text, str) for text in constraint):
            return {"kind": "choice", "text": json.dumps(constraint)}
        case _:
            return None


def _response_format_grammar(form: Any, *, flat: bool) -> RecordedGrammar | None:
    if not isinstance(form, dict):
        return None
    if form.get("type") == "json_object":
        return ANY_OBJECT
    holder = form if flat else form.get("json_schema")
    if form.get("type") != "json_schema" or not isinstance(holder, dict):
        return None
    return _schema_grammar(holder.get("schema"))


def _forced_call_grammar(
    forced: ForcedCall, functions: Sequence[Fields], *, single: bool
) -> RecordedGrammar | None:
    """Return the JSON schema of a forced call, or None if it cannot be determined.

    Args:
        forced: the call, as `forced_call` returns it.
        functions: all tools, each with its name and parameters.
        single: at most one call is allowed.
    """
    if forced is ANY_CALL:
        return _any_call_grammar(functions, single=single)
    named = {function["name"]: function.get("parameters") for function in functions}
    name = forced.get("name")
    return _schema_grammar(named[name] or NO_PARAMETERS) if name in named else None


def _tag_grammar(
    syntax: str, fields: Fields, forced: ForcedCall | None, functions: Sequence[Fields]
) -> RecordedGrammar | None:
    """Return the structural tag of a request with tools, or None if vLLM makes none.

    The tag constrains the syntax of all calls, and the arguments of strict tools only.
    """
    if not all(_is_flag(function.get("strict")) for function in functions):
        return None
    one_call = fields.get("parallel_tool_calls") is False
    choice: Choice = "forced"
    if forced is None:
        # vLLM makes no tag if the choice is null or an object.
        is_constrained = one_call or any(function.get("strict") for function in functions)
        if not is_constrained or fields.get("tool_choice", "auto") != "auto":
            return None
        choice = "auto"
    elif forced is ANY_CALL:
        choice = "required"
    else:
        functions = [tool for tool in functions if tool["name"] == forced.get("name")]
        if not functions:
            return None
    tools = tuple(
        OfferedTool(
            name=function["name"],
            parameters=function.get("parameters") if function.get("strict") else None,
        )
        for function in functions
    )
    tag = ToolTag(model=syntax, choice=choice, tools=tools, one_call=one_call)
    return {"kind": "tools", "text": text_of_tag(tag)}


def forced_call(choice: Any, named: Any) -> ForcedCall:
    """Return the call that a `tool_choice` forces: `ANY_CALL`, `{"name": …}` or `UNREADABLE_CALL`.

    `named` is the part of `choice` that holds the function's name.
    """
    if choice == "required":
        return ANY_CALL
    is_function = isinstance(choice, dict) and choice.get("type") == "function"
    name = named.get("name") if is_function and isinstance(named, dict) else None
    return {"name": name} if isinstance(name, str) else UNREADABLE_CALL


def functions_if_well_formed(tools: list[Any]) -> list[Fields] | None:
    """Return `tools` if all are well-formed functions, else None."""
    return tools if all(map(_is_function, tools)) else None


def _is_function(tool: Any) -> bool:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        return False
    return isinstance(tool.get("parameters"), dict | None)


def _is_flag(value: Any) -> bool:
    """Return whether a value is a boolean or null: vLLM also reads 0 and "no" as false."""
    return isinstance(value, bool | None)


def _schema_grammar(schema: Any) -> RecordedGrammar | None:
    # vLLM serializes a schema the same way.
    return {"kind": "json", "text": json.dumps(schema)} if isinstance(schema, dict) else None


def _any_call_grammar(functions: Sequence[Fields], *, single: bool) -> RecordedGrammar | None:
    """Return the JSON schema of a list of calls of any tools, or None if their `$defs` conflict.

    As in vLLM, the `$defs` of all tools stand at the schema's top.
    """
    definitions: dict[str, Any] = {}
    for function in functions:
        own = (function.get("parameters") or {}).get("$defs", {})
        if not isinstance(own, dict) or any(definitions.get(n, d) != d for n, d in own.items()):
            return None
        definitions |= own
    items = {"type": "object", "anyOf": [_call_schema(function) for function in functions]}
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": items}
    if single:
        schema["maxItems"] = 1
    return _schema_grammar(schema | ({"$defs": definitions} if definitions else {}))


def _call_schema(function: Fields) -> Fields:
    schema = function.get("parameters")
    own = {n: part for n, part in schema.items() if n != "$defs"} if schema else NO_PARAMETERS
    return {
        "properties": {"name": {"type": "string", "enum": [function["name"]]}, "parameters": own},
        "required": ["name", "parameters"],
    }


# vLLM's tool parsers without a grammar for the model's own syntax. With these, `strict` does not
# affect sampling, and `parallel_tool_calls` does only if a call is forced. For a parser with such a
# grammar vLLM makes a structural tag if a call is forced, a tool is strict, or at most one call is
# allowed. Parsers named neither here nor below have their own rules (`glm47` constrains every call
# with tools), or a syntax that vLLM builds itself. Source: vLLM 0.32, `structural_tag_model` in
# `tool_parsers/abstract_tool_parser.py`; `tests/integration/proxy/vllm/test_vllm_tool_parsers.py`
# compares.
WITHOUT_GRAMMARS: Final = frozenset(
    {
        *("cohere_command3", "cohere_command4", "ernie45", "granite-20b-fc", "hf", "hunyuan_a13b"),
        *("hy_v3", "llama4_pythonic", "olmo3", "phi4_mini_json", "pythonic", "xlam"),
    }
)

# By tool parser: the name of its syntax, if the trainer can build the structural tags for it.
TAGS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("hermes", "qwen3_json"), "hermes"),
    **dict.fromkeys(("llama3_json", "llama4_json"), "llama"),
    **dict.fromkeys(("qwen3_coder", "qwen3_xml", "step3p5"), "qwen_3_coder"),
    "longcat": "longcat",
    "mimo": "mimo",
    "kimi_k2": "kimi",
    "deepseek_v3": "deepseek_r1",
    "deepseek_v31": "deepseek_v3_1",
    "deepseek_v32": "deepseek_v3_2",
    "deepseek_v4": "deepseek_v4",
    "deepseek_v41": "deepseek_v4_1",
}


def has_grammars(tool_parser: str | None) -> bool:
    """Return whether a server with this parser (None: unknown) may constrain tool calls."""
    return tool_parser not in WITHOUT_GRAMMARS


def tag_model(tool_parser: str | None) -> str | None:
    """Return the name of a tool parser's syntax, a value of `TAGS`, or None if unknown."""
    return None if tool_parser is None else TAGS.get(tool_parser)
