"""The structural tag that vLLM makes of a request is what the trainer makes of its record."""

import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.formats.messages import chat_request
from proxy.formats.sampling import TAGS, has_grammars, tag_model
from store.values.grammars import Grammar
from store.values.sampling import distribution_of
from tests.support.proxy.grammars import (
    CHAT,
    CHOICES,
    FORMS,
    OWN,
    RESPONSES,
    SCHEMAS,
    grammars_with,
    recorded,
)

# Importing vLLM takes its time.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]

Asked = dict[str, Any]
# Also what vLLM takes for true and false.
FLAGS = st.sampled_from([None, True, False, 0, 1, "no", "yes"])
FUNCTIONS = st.lists(
    st.fixed_dictionaries(
        {"name": st.sampled_from(["f", "g", "é h", 'a"b'])},
        optional={
            "parameters": SCHEMAS,
            "strict": FLAGS,
            "description": st.sampled_from([None, "d"]),
            "defer_loading": FLAGS,
        },
    ),
    min_size=1,
    max_size=3,
)
PARSERS = st.sampled_from(sorted(TAGS))


@pytest.fixture(scope="module")
def vllm_grammars() -> dict[str, Callable[[str, Asked], Any]]:
    """The grammar that a vLLM makes of a request, by its tool parser."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.tool_parsers import ToolParserManager

        return {name: grammars_with(ToolParserManager.get_tool_parser(name)) for name in TAGS}


def as_vllm(grammar: Grammar | None) -> Grammar | None:
    """A recorded grammar in vLLM's words."""
    if grammar is None or grammar.kind != "tools":
        return grammar
    # The serving role's tests are collected without vLLM, which brings xgrammar, and without torch.
    import xgrammar

    from trainer.learners.replay.grammars import structural_tag

    tag = structural_tag(xgrammar, grammar.text)
    return Grammar(kind="structural_tag", text=tag)  # type: ignore[arg-type]


def assert_agrees(theirs: Any, api: str, fields: Asked, parser: str) -> Grammar | None:
    """The grammar that is recorded, which must be vLLM's where the call may be trained."""
    body = json.dumps(fields)
    found, reason = recorded(api, body, tool_tag=tag_model(parser))
    if theirs == "refused" or reason is not None:
        return None
    grammar = distribution_of(found).grammar
    assert as_vllm(grammar) == theirs
    return grammar


def said(**fields: Any) -> Asked:
    return {name: value for name, value in fields.items() if value is not None}


@settings(max_examples=600)
@given(PARSERS, FUNCTIONS, CHOICES, FLAGS, FORMS, st.none() | OWN, st.booleans())
def test_record_of_a_trainable_chat_with_tools_has_vllms_structural_tag(
    vllm_grammars: Any,
    parser: str,
    functions: Any,
    choice: Any,
    several: Any,
    form: Any,
    own: Any,
    formed: bool,
) -> None:
    tools = [{"type": "function", "function": one} for one in functions]
    fields = CHAT | said(tools=tools, tool_choice=choice, parallel_tool_calls=several)
    if formed:
        fields |= said(response_format=form, structured_outputs=own)
    assert_agrees(vllm_grammars[parser]("chat", fields), "chat", fields, parser)


@settings(max_examples=400)
@given(PARSERS, FUNCTIONS, CHOICES, FLAGS, st.sampled_from([None, "text", "json_object"]))
def test_record_of_a_trainable_response_with_tools_has_vllms_structural_tag(
    vllm_grammars: Any, parser: str, functions: Any, choice: Any, several: Any, form: Any
) -> None:
    if isinstance(choice, dict) and isinstance(choice.get("function"), dict):
        choice = {"type": "function", **choice["function"]}
    tools = [{"type": "function", **one} for one in functions]
    fields = RESPONSES | said(tools=tools, tool_choice=choice, parallel_tool_calls=several)
    if form is not None:
        fields["text"] = {"format": {"type": form}}
    assert_agrees(vllm_grammars[parser]("responses", fields), "responses", fields, parser)


@settings(max_examples=300)
@given(
    PARSERS,
    FUNCTIONS,
    st.sampled_from([None, "auto", "any", "none", "tool"]),
    st.sampled_from([None, True, False]),
)
def test_record_of_a_trainable_message_with_tools_has_vllms_structural_tag(
    vllm_grammars: Any, parser: str, functions: Any, choice: Any, one: Any
) -> None:
    """A message is sent as a chat, whose tag it gets."""
    tools = [
        said(name=f["name"], strict=f.get("strict"), input_schema=f.get("parameters") or {})
        for f in functions
    ]
    fields: Asked = {"model": "m", "max_tokens": 5, "messages": CHAT["messages"], "tools": tools}
    if choice is not None:
        named = "f" if choice == "tool" else None
        fields["tool_choice"] = said(type=choice, name=named, disable_parallel_tool_use=one)
    as_chat = chat_request(fields)
    if as_chat is not None:
        theirs = vllm_grammars[parser]("chat", json.loads(json.dumps(as_chat)))
        assert_agrees(theirs, "messages", fields, parser)


SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
STRICT = {"name": "f", "parameters": SCHEMA, "strict": True}
FREE = {"name": "g", "description": "d", "parameters": SCHEMA}
HELD: dict[str, Asked] = {
    "strict": {},
    "strict, said": {"tool_choice": "auto"},
    "one at most": {"parallel_tool_calls": False},
    "required": {"tool_choice": "required"},
    "one, required": {"tool_choice": "required", "parallel_tool_calls": False},
    "named": {"tool_choice": {"type": "function", "function": {"name": "g"}}},
    "named, one": {
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
    },
}


@pytest.mark.parametrize("how", HELD)
@pytest.mark.parametrize("parser", TAGS)
def test_supported_tool_requests_of_chat_and_responses_have_vllms_structural_tag(
    vllm_grammars: Any, parser: str, how: str
) -> None:
    makes, tools = vllm_grammars[parser], [STRICT, FREE]
    asked = {"tools": [{"type": "function", "function": one} for one in tools], **HELD[how]}
    chat = assert_agrees(makes("chat", CHAT | asked), "chat", CHAT | asked, parser)
    asked["tools"] = [{"type": "function", **one} for one in tools]
    choice = asked.get("tool_choice")
    if isinstance(choice, dict):
        asked["tool_choice"] = {"type": "function", **choice["function"]}
    fields = RESPONSES | asked
    assert chat is not None
    assert chat.kind == "tools"
    response = assert_agrees(makes("responses", fields), "responses", fields, parser)
    assert response == chat


@pytest.mark.parametrize("parser", TAGS)
def test_unconstrained_tools_have_no_structural_tag(vllm_grammars: Any, parser: str) -> None:
    fields = CHAT | {"tools": [{"type": "function", "function": FREE}]}
    assert vllm_grammars[parser]("chat", fields) is None
    found, reason = recorded("chat", json.dumps(fields), tool_tag=tag_model(parser))
    assert (found, reason) == ({"temperature": 1.0}, None)


@pytest.mark.parametrize(
    "said",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_object"}, "tool_choice": "required"},
        {"structured_outputs": {"regex": "a"}},
        {"guided_regex": "a"},
        {"tools": [{"type": "function", "function": STRICT}] * 2},
        {"tools": [{"type": "function", "function": STRICT | {"strict": "yes"}}]},
        {"parallel_tool_calls": "no"},
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
    ],
)
def test_unsupported_tool_requests_are_recorded_as_constrained_sampling(said: Asked) -> None:
    asked = CHAT | {"tools": [{"type": "function", "function": STRICT}]} | said
    assert recorded("chat", json.dumps(asked), tool_tag="hermes")[1] == "constrained_sampling"


def test_custom_tools_are_recorded_as_constrained_sampling() -> None:
    tools = [{"type": "function", **STRICT}, {"type": "custom", "name": "c"}]
    body = json.dumps(RESPONSES | {"tools": tools})
    assert recorded("responses", body, tool_tag="hermes")[1] == "constrained_sampling"


def test_tags_are_those_of_vllms_tool_parsers_that_build_no_tag_themselves() -> None:
    from vllm.tool_parsers import _TOOL_PARSERS_TO_REGISTER, ToolParserManager
    from vllm.tool_parsers.abstract_tool_parser import ToolParser

    found = {}
    for name in _TOOL_PARSERS_TO_REGISTER:
        parser = ToolParserManager.get_tool_parser(name)
        own = parser.get_structural_tag is not ToolParser.get_structural_tag
        if parser.default_tool_strict_level is None and not own:
            found[name] = parser.structural_tag_model
    # Those are vLLM's own, and not built here.
    others = {"harmony", "kimi_k3", "minimax", "plamo3", "glm_4_7", None}
    assert {name: tag for name, tag in found.items() if tag not in others} == dict(TAGS)
    assert all(map(has_grammars, TAGS))
    assert tag_model("pythonic") is tag_model(None) is tag_model("glm47") is None
