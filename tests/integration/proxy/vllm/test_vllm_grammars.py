"""What vLLM holds a reply to is what is recorded, or the call is not trainable."""

import json
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.formats.messages.as_chat import chat_request
from proxy.formats.registry import FORMATS
from proxy.formats.tool_parsers import WITHOUT_GRAMMARS, has_grammars
from store.values.distribution import distribution_of
from store.values.grammars import Grammar
from tests.integration.proxy.vllm.test_vllm_sampling import recorded, written

# Importing vLLM takes its time.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]

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
    """The grammar that a vLLM with this tool parser makes of a request."""
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


@pytest.fixture(scope="module")
def vllm_grammar() -> Any:
    """The grammar that vLLM makes of a request, with a tool parser that reads JSON."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.tool_parsers.pythonic_tool_parser import PythonicToolParser

        return grammars_with(PythonicToolParser)


@pytest.fixture(scope="module")
def hermes_grammar() -> Any:
    """The same with a tool parser whose model has a syntax of its own, `pawl up`'s."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser

        return grammars_with(Hermes2ProToolParser)


class Held(NamedTuple):
    """The grammar that a call is held to as we read its record, and as vLLM has it.

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


@settings(max_examples=400)
@given(st.sampled_from(["chat", "completions"]), FORMS, st.none() | OWN, FUNCTIONS, CHOICES)
def test_any_form_of_a_chat(
    vllm_grammar: Any, api: str, form: Any, own: Any, functions: Any, choice: Any
) -> None:
    said = {"response_format": form, "structured_outputs": own}
    fields = {**CHAT, "prompt": "q", **said} if api == "completions" else {**CHAT, **said}
    if api == "chat":
        if functions:
            fields["tools"] = [{"type": "function", "function": one} for one in functions]
        fields["tool_choice"] = choice
    else:
        del fields["messages"]
    fields = {name: value for name, value in fields.items() if value is not None}
    both = held(vllm_grammar, api, fields)
    assert both.ours == both.theirs


@settings(max_examples=300)
@given(FUNCTIONS, CHOICES, st.sampled_from([None, True, False, "no", 0, 1]))
def test_any_forced_call(vllm_grammar: Any, functions: Any, choice: Any, several: Any) -> None:
    fields: dict[str, Any] = {**CHAT, "tool_choice": choice}
    fields["tools"] = [{"type": "function", "function": one} for one in functions]
    fields["parallel_tool_calls"] = several
    both = held(vllm_grammar, "chat", {n: v for n, v in fields.items() if v is not None})
    assert both.ours == both.theirs


@settings(max_examples=300)
@given(FORMS, st.none() | OWN, FUNCTIONS, CHOICES)
def test_any_form_of_a_response(
    vllm_grammar: Any, form: Any, own: Any, functions: Any, choice: Any
) -> None:
    if isinstance(form, dict) and isinstance(form.get("json_schema"), dict):
        form = {"type": "json_schema", "name": "n", **form["json_schema"]}
    fields: dict[str, Any] = {**RESPONSES, "text": {"format": form}, "structured_outputs": own}
    if functions:
        fields["tools"] = [{"type": "function", **one} for one in functions]
    if isinstance(choice, dict) and isinstance(choice.get("function"), dict):
        choice = {"type": "function", **choice["function"]}
    fields["tool_choice"] = choice
    both = held(vllm_grammar, "responses", {n: v for n, v in fields.items() if v is not None})
    assert both.ours == both.theirs


@settings(max_examples=400)
@given(FORMS, st.none() | OWN, FUNCTIONS, CHOICES, st.sampled_from([None, True, False]))
def test_a_syntax_of_the_models_own_is_never_taken_for_no_constraint(
    hermes_grammar: Any, form: Any, own: Any, functions: Any, choice: Any, several: Any
) -> None:
    """What held a trainable call is recorded, but for a forced call, whose reply shows it."""
    fields: dict[str, Any] = {**CHAT, "response_format": form, "structured_outputs": own}
    fields["tools"] = [{"type": "function", "function": one} for one in functions] or None
    fields |= {"tool_choice": choice, "parallel_tool_calls": several}
    fields = {name: value for name, value in fields.items() if value is not None}
    theirs, (found, reason) = hermes_grammar("chat", fields), recorded("chat", json.dumps(fields))
    if theirs == "refused" or reason is not None:
        return
    forced = choice not in (None, "auto", "none")
    ours = distribution_of(found).grammar
    assert (theirs.kind if forced else theirs) == ("structural_tag" if forced else ours)


@settings(max_examples=400)
@given(
    *(st.sampled_from(["chat", "responses"]), FORMS, FUNCTIONS, CHOICES),
    st.sampled_from([None, True, False]),
)
def test_tools_of_a_parser_without_grammars(
    vllm_grammar: Any, api: str, form: Any, functions: Any, choice: Any, several: Any
) -> None:
    """A server that is known to have such a parser leaves strict tools free, and we know it."""
    chat = api == "chat"
    fields: dict[str, Any] = {**CHAT, "response_format": form} if chat else dict(RESPONSES)
    if functions:
        fields["tools"] = [
            {"type": "function", "function": one} if chat else {"type": "function", **one}
            for one in functions
        ]
    fields |= {"tool_choice": choice, "parallel_tool_calls": several}
    fields = {name: value for name, value in fields.items() if value is not None}
    both = held(vllm_grammar, api, fields, tool_grammars=False)
    assert both.ours == both.theirs


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_strict_tools_are_trained_where_the_parser_is_told(vllm_grammar: Any, api: str) -> None:
    tool: dict[str, Any] = F | {"strict": True}
    asked = CHAT | {"tools": [{"type": "function", "function": tool}]}
    if api == "responses":
        asked = RESPONSES | {"tools": [{"type": "function", **tool}]}
    both = held(vllm_grammar, api, asked, tool_grammars=False)
    assert both.is_trained
    assert both.ours == both.theirs
    assert not held(vllm_grammar, api, asked).is_trained


def test_the_parsers_that_are_named_have_no_grammars() -> None:
    from vllm.tool_parsers import ToolParserManager
    from vllm.tool_parsers.abstract_tool_parser import ToolParser

    for name in WITHOUT_GRAMMARS:
        parser = ToolParserManager.get_tool_parser(name)
        assert (parser.structural_tag_model, parser.default_tool_strict_level) == (None, None), name
        assert parser.get_structural_tag is ToolParser.get_structural_tag, name
        assert parser.adjust_request is ToolParser.adjust_request, name
        assert not parser.engine_based_streaming, name
        assert not has_grammars(name)
    assert has_grammars("hermes")
    assert has_grammars(None)


@pytest.mark.parametrize("choice", [None, "auto"])
def test_one_call_at_most_is_a_grammar_for_some_servers(
    hermes_grammar: Any, vllm_grammar: Any, choice: str | None
) -> None:
    asked = {**CHAT, "tools": TOOLS, "parallel_tool_calls": False}
    asked |= {"tool_choice": choice} if choice else {}
    assert hermes_grammar("chat", asked).kind == "structural_tag"
    assert vllm_grammar("chat", asked) is None
    assert recorded("chat", json.dumps(asked))[1] == "constrained_sampling"
    several = asked | {"parallel_tool_calls": True}
    assert hermes_grammar("chat", several) is None
    assert recorded("chat", json.dumps(several))[1] is None


SCHEMA = {"type": "object", "properties": {"b": {"$ref": "#/$defs/x"}}, "$defs": {"x": {}}}
F = {"name": "f", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": F}, {"type": "function", "function": {"name": "g"}}]
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("api", "said"),
    [
        *((api, {"response_format": FORM}) for api in ("chat", "completions")),
        *((api, {"structured_outputs": {"json": SCHEMA}}) for api in ("chat", "responses")),
        *((api, {"structured_outputs": {"choice": ["é", "b"]}}) for api in ("chat", "completions")),
        ("chat", {"structured_outputs": {"regex": "a+", "whitespace_pattern": None}}),
        ("chat", {"response_format": {"type": "json_object"}, "stop_token_ids": [5]}),
        ("chat", {"tools": TOOLS, "tool_choice": "required"}),
        ("chat", {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}),
        ("chat", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}),
        ("chat", {"tools": TOOLS, "tool_choice": "none", "response_format": FORM}),
        ("responses", {"text": {"format": {"type": "json_object"}}}),
        ("responses", {"tools": [{"type": "function", **F}], "tool_choice": "required"}),
        (
            "responses",
            {
                "tools": [{"type": "function", **F}],
                "tool_choice": {"type": "function", "name": "f"},
            },
        ),
    ],
)
def test_these_are_replayed(vllm_grammar: Any, api: str, said: dict[str, Any]) -> None:
    asked = {"chat": CHAT, "completions": {"model": "m", "prompt": "q"}, "responses": RESPONSES}
    both = held(vllm_grammar, api, asked[api] | said)
    assert both.is_trained
    assert both.ours == both.theirs


@pytest.mark.parametrize(
    ("api", "said"),
    [
        ("chat", {"response_format": FORM, "tools": TOOLS}),
        ("chat", {"response_format": FORM, "guided_regex": "a"}),
        ("chat", {"response_format": FORM, "structured_outputs": {"json": {}}}),
        ("chat", {"response_format": FORM, "tools": TOOLS, "tool_choice": "required"}),
        ("chat", {"response_format": {"type": "structural_tag", "format": {}}}),
        ("chat", {"structured_outputs": {"structural_tag": "{}"}}),
        ("chat", {"structured_outputs": {"json": {}, "whitespace_pattern": " "}}),
        ("chat", {"tools": [*TOOLS, *TOOLS], "tool_choice": "required"}),
        ("chat", {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": 0}),
        ("chat", {"tools": [{"type": "custom", "custom": F}], "tool_choice": "required"}),
        ("responses", {"tools": [{"type": "custom", "name": "f"}], "tool_choice": "required"}),
    ],
)
def test_these_are_not(api: str, said: dict[str, Any]) -> None:
    asked = {"chat": CHAT, "responses": RESPONSES}
    assert recorded(api, json.dumps(asked[api] | said))[1] == "constrained_sampling"


def test_a_message_has_the_grammar_of_the_chat_that_it_is_sent_as(vllm_grammar: Any) -> None:
    asked = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "q"}]}
    tools = [{"name": "f", "input_schema": SCHEMA}]
    for said in (
        {"tools": tools, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        {"tools": tools, "tool_choice": {"type": "tool", "name": "f"}},
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    ):
        as_chat = chat_request(asked | said)
        assert as_chat is not None
        found, reason = recorded("messages", json.dumps(asked | said))
        assert reason is None
        assert distribution_of(found).grammar == vllm_grammar("chat", as_chat)


@pytest.mark.parametrize("api", FORMATS)
@given(st.dictionaries(st.sampled_from([*"abc", "type", "format", "name", "function"]), VALUES))
def test_whatever_a_request_says_its_grammar_is_read_or_not(api: str, odd: Any) -> None:
    names = ("response_format", "text", "output_config", "structured_outputs", "tool_choice")
    for name in names:
        for value in (odd, {"format": odd}, {"json_schema": odd}, [odd]):
            found, reason = recorded(api, json.dumps({"tools": [odd], name: value}))
            assert reason is not None or distribution_of(found) is not None
