"""What vLLM holds a reply to is what is recorded, or the call is not trainable."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.formats.messages import chat_request
from proxy.formats.registry import FORMATS
from store.values.sampling import distribution_of
from tests.support.proxy.grammars import (
    CHAT,
    CHOICES,
    FORM,
    FORMS,
    FUNCTIONS,
    OWN,
    RESPONSES,
    SCHEMA,
    TOOLS,
    VALUES,
    F,
    held,
    recorded,
)

# Importing vLLM takes its time.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]


@settings(max_examples=400)
@given(st.sampled_from(["chat", "completions"]), FORMS, st.none() | OWN, FUNCTIONS, CHOICES)
def test_record_of_a_trainable_chat_or_completion_has_the_grammar_that_vllm_applies(
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
def test_record_of_a_trainable_forced_tool_call_has_the_grammar_that_vllm_applies(
    vllm_grammar: Any, functions: Any, choice: Any, several: Any
) -> None:
    fields: dict[str, Any] = {**CHAT, "tool_choice": choice}
    fields["tools"] = [{"type": "function", "function": one} for one in functions]
    fields["parallel_tool_calls"] = several
    both = held(vllm_grammar, "chat", {n: v for n, v in fields.items() if v is not None})
    assert both.ours == both.theirs


@settings(max_examples=300)
@given(FORMS, st.none() | OWN, FUNCTIONS, CHOICES)
def test_record_of_a_trainable_response_has_the_grammar_that_vllm_applies(
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


@pytest.mark.parametrize(
    ("api", "said"),
    [
        *((api, {"response_format": FORM}) for api in ("chat", "completions")),
        *((api, {"structured_outputs": {"json": SCHEMA}}) for api in ("chat", "responses")),
        *((api, {"structured_outputs": {"choice": ["é", "b"]}}) for api in ("chat", "completions")),
        ("chat", {"structured_outputs": {"regex": "a+", "whitespace_pattern": None}}),
        ("completions", {"structured_outputs": {"grammar": 'root ::= "a"'}}),
        ("chat", {"structured_outputs": {"json_object": True, "regex": None}}),
        ("chat", {"response_format": {"type": "json_object"}, "stop_token_ids": [5]}),
        ("chat", {"tools": TOOLS, "tool_choice": "required"}),
        ("chat", {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}),
        ("chat", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}),
        ("chat", {"tools": TOOLS, "tool_choice": "none", "response_format": FORM}),
        ("responses", {"text": {"format": {"type": "json_object"}}}),
        ("responses", {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}}),
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
def test_supported_constraints_are_trained_with_vllms_grammar(
    vllm_grammar: Any, api: str, said: dict[str, Any]
) -> None:
    asked = {"chat": CHAT, "completions": {"model": "m", "prompt": "q"}, "responses": RESPONSES}
    both = held(vllm_grammar, api, asked[api] | said)
    assert both.is_trained
    assert both.ours == both.theirs


def test_record_of_a_message_has_the_grammar_of_its_translated_chat(vllm_grammar: Any) -> None:
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
def test_odd_constraint_is_readable_or_makes_the_call_untrainable(api: str, odd: Any) -> None:
    names = ("response_format", "text", "output_config", "structured_outputs", "tool_choice")
    for name in names:
        for value in (odd, {"format": odd}, {"json_schema": odd}, [odd]):
            found, reason = recorded(api, json.dumps({"tools": [odd], name: value}))
            assert reason is not None or distribution_of(found) is not None
