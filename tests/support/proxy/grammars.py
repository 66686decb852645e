"""Compare the grammar read from a recorded request with the one that vLLM builds, for any API."""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
from hypothesis import strategies as st

from proxy.formats.base import SampledTokens, read_request
from proxy.formats.registry import FORMATS
from proxy.trainable import Reason, sampling_settings, why_not_replayed, why_untrainable
from store.values.grammars import Grammar
from store.values.sampling import distribution_of

SAMPLED = SampledTokens(
    prompt_ids=(1,), sampled_ids=(2,), sampled_logprobs=(-1.0,), choices=1, completion_tokens=1
)


def why_not_trainable(
    status: Any,
    http_status: int | None,
    policy_version: int | None,
    settings: dict[str, Any],
    sampled: Any,
    rules: Any,
    *,
    only_text: bool,
) -> Reason | None:
    """Return the first reason why a call with these settings cannot be trained on."""

    def judge(sure: bool) -> Reason | None:
        return why_not_replayed(settings, rules, sure=sure)

    return why_untrainable(status, http_status, policy_version, sampled, judge, only_text=only_text)


def written(asked: Any) -> Grammar | None:
    """Return a constraint as vLLM's scheduler has it, in our words."""
    if asked is None:
        return None
    from vllm.v1.structured_output.request import get_structured_output_key

    option, text = get_structured_output_key(asked)
    if option.name == "JSON_OBJECT":
        return Grammar(kind="json", text='{"type": "object"}')
    return Grammar(kind=option.name.lower(), text=text)  # type: ignore[arg-type]


def recorded(
    api: str, body: str, *, tool_grammars: bool = True, tool_tag: str | None = None
) -> tuple[dict[str, Any], str | None]:
    request = read_request(body.encode())
    fields = None if request.parsed is None else request.fields
    rules = FORMATS[api].sampling
    found = sampling_settings(fields, 1.0, rules, tool_grammars=tool_grammars, tool_tag=tool_tag)
    # It is written down as JSON.
    assert msgspec.json.decode(msgspec.json.encode(found)) == found
    return found, why_not_trainable("complete", 200, 0, found, SAMPLED, rules, only_text=True)


CHAT = {"model": "m", "messages": [{"role": "user", "content": "q"}]}
RESPONSES = {"model": "m", "input": "q"}

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["object", "a", "é\n"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=4,
)
SCHEMAS = (
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.just("object"),
            "properties": st.dictionaries(st.sampled_from(["b", "a", "é"]), VALUES, max_size=2),
            "$defs": st.dictionaries(st.sampled_from("xy"), VALUES, max_size=2),
        },
    )
    | VALUES
)
FORMS = st.one_of(
    st.sampled_from([None, {"type": "text"}, {"type": "json_object"}, {"type": "odd"}, "json"]),
    SCHEMAS.map(lambda s: {"type": "json_schema", "json_schema": {"name": "n", "schema": s}}),
    SCHEMAS.map(lambda s: {"type": "json_schema", "json_schema": s}),
)
OWN = st.fixed_dictionaries(
    {},
    optional={
        "json": SCHEMAS,
        "regex": st.sampled_from(["a+", "", None, 7]),
        "choice": st.sampled_from([["a", "b"], [], ["a", 7], None]),
        "grammar": st.sampled_from(['root ::= "a"', "", None]),
        "json_object": st.sampled_from([True, False, None, 1]),
        "disable_any_whitespace": st.booleans(),
        "whitespace_pattern": st.sampled_from([None, "", " "]),
    },
)
CHOICES = st.sampled_from(
    [
        *(None, "auto", "none", "required", "any", {"type": "auto"}),
        *({"type": "function", "function": {"name": name}} for name in ("f", "g", "h", 7)),
        {"type": "function", "name": "f"},
    ]
)
FUNCTIONS = st.lists(
    st.fixed_dictionaries(
        {"name": st.sampled_from("fg")},
        optional={"parameters": SCHEMAS, "strict": st.booleans() | st.none()},
    ),
    max_size=2,
)


def grammars_with(tool_parser: type) -> Callable[[str, dict[str, Any]], Any]:
    """Return what gives the grammar that a vLLM with this tool parser makes of a request."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.exceptions import VLLMValidationError
    from vllm.parser.abstract_parser import DelegatingParser

    kinds = {
        "chat": ChatCompletionRequest,
        "completions": CompletionRequest,
        "responses": ResponsesRequest,
    }
    parser = object.__new__(DelegatingParser)
    parser._reasoning_parser, parser._tool_parser = None, object.__new__(tool_parser)
    # Parsers that read a model's syntax with an engine ask it last, for the special tokens' text.
    parser._tool_parser._parser_engine = SimpleNamespace(adjust_request=lambda request: request)

    def made(api: str, fields: dict[str, Any]) -> Grammar | str | None:
        try:
            request = kinds[api](**json.loads(json.dumps(fields)))
            if api != "completions":
                request = parser.adjust_request(request)
            return written(request.to_sampling_params(16, {}).structured_outputs)
        except (ValueError, TypeError, AssertionError, VLLMValidationError):
            return "refused"

    return made


class Held(NamedTuple):
    """Hold the grammar of a call, as we read it of its record and as vLLM has it.

    Both are None for a call that is not trained: what it was held to does not matter.
    """

    is_trained: bool
    ours: Grammar | None = None
    theirs: Grammar | None = None


def held(
    vllm_grammar: Any, api: str, fields: dict[str, Any], *, tool_grammars: bool = True
) -> Held:
    theirs = vllm_grammar(api, fields)
    found, reason = recorded(api, json.dumps(fields), tool_grammars=tool_grammars)
    if theirs == "refused" or reason is not None:
        return Held(False)
    return Held(True, distribution_of(found).grammar, theirs)


SCHEMA = {"type": "object", "properties": {"b": {"$ref": "#/$defs/x"}}, "$defs": {"x": {}}}
F = {"name": "f", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": F}, {"type": "function", "function": {"name": "g"}}]
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
