"""The grammar that a request names is recorded, in every API, where it is certain which it is."""

import json
from typing import Any

import pytest

from proxy.formats.registry import FORMATS
from proxy.trainable import sampling_settings
from tests.support.proxy.grammars import recorded

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"$ref": "#/$defs/x"}}}
DEFINED = SCHEMA | {"$defs": {"x": {"type": "integer"}}}
NOTHING = {"type": "object", "properties": {}}
F = {"name": "f", "parameters": DEFINED}
CHAT_TOOLS = [{"type": "function", "function": one} for one in (F, {"name": "g"})]
TOOLS = [{"type": "function", **one} for one in (F, {"name": "g"})]
MESSAGE_TOOLS = [{"name": "f", "input_schema": DEFINED}, {"name": "g", "input_schema": NOTHING}]
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
# What messages need to be sent as a chat.
MESSAGE = {"model": "m", "max_tokens": 5, "messages": []}


def call_of(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    named = {"name": {"type": "string", "enum": [name]}, "parameters": parameters}
    return {"properties": named, "required": ["name", "parameters"]}


ANY_CALL = {
    "type": "array",
    "minItems": 1,
    "items": {"type": "object", "anyOf": [call_of("f", SCHEMA), call_of("g", NOTHING)]},
    "$defs": DEFINED["$defs"],
}


def grammar(api: str, fields: dict[str, Any]) -> Any:
    return sampling_settings(fields, 1.0, FORMATS[api].sampling).get("grammar")


def of_schema(schema: dict[str, Any]) -> dict[str, str]:
    return {"kind": "json", "text": json.dumps(schema)}


@pytest.mark.parametrize(
    ("api", "fields", "schema"),
    [
        *((api, {"response_format": FORM}, SCHEMA) for api in ("chat", "completions")),
        ("chat", {"response_format": {"type": "json_object"}}, {"type": "object"}),
        ("chat", {"structured_outputs": {"json": SCHEMA}}, SCHEMA),
        ("chat", {"structured_outputs": {"json_object": True}}, {"type": "object"}),
        ("chat", {"structured_outputs": {"json": SCHEMA, "regex": None}}, SCHEMA),
        ("chat", {"tools": CHAT_TOOLS, "tool_choice": "required"}, ANY_CALL),
        (
            "chat",
            {"tools": CHAT_TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
            DEFINED,
        ),
        ("chat", {"tools": CHAT_TOOLS, "tool_choice": "none", "response_format": FORM}, SCHEMA),
        ("responses", {"text": {"format": {"type": "json_schema", "schema": SCHEMA}}}, SCHEMA),
        ("responses", {"text": {"format": {"type": "json_object"}}}, {"type": "object"}),
        ("responses", {"tools": TOOLS, "tool_choice": "required"}, ANY_CALL),
        (
            "responses",
            {"tools": TOOLS, "tool_choice": {"type": "function", "name": "g"}},
            NOTHING,
        ),
        (
            "messages",
            {"tools": MESSAGE_TOOLS, "tool_choice": {"type": "tool", "name": "f"}},
            DEFINED,
        ),
        ("messages", {"tools": MESSAGE_TOOLS, "tool_choice": {"type": "any"}}, ANY_CALL),
        (
            "messages",
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            SCHEMA,
        ),
    ],
)
def test_a_schema_is_recorded_with_its_keys_in_order(
    api: str, fields: dict[str, Any], schema: dict[str, Any]
) -> None:
    assert grammar(api, MESSAGE | fields) == of_schema(schema)


def test_one_call_of_any_tool() -> None:
    asked = {"tools": CHAT_TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    found = json.loads(grammar("chat", asked)["text"])
    assert found == ANY_CALL | {"maxItems": 1}
    assert list(found) == ["type", "minItems", "items", "maxItems", "$defs"]


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        ("regex", "a+", "a+"),
        ("grammar", 'root ::= "a"', 'root ::= "a"'),
        ("choice", ["é", "b"], '["\\u00e9", "b"]'),
        ("json", '{ "type":"object"}', '{ "type":"object"}'),
    ],
)
@pytest.mark.parametrize("api", ["chat", "completions", "responses"])
def test_vllms_own_field(api: str, kind: str, value: Any, text: str) -> None:
    own = {kind: value, "disable_any_whitespace": False, "whitespace_pattern": None}
    assert grammar(api, {"structured_outputs": own}) == {"kind": kind, "text": text}


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        ("chat", {"response_format": FORM, "tools": CHAT_TOOLS}),
        ("chat", {"response_format": FORM, "tools": CHAT_TOOLS, "tool_choice": "required"}),
        *(
            ("chat", {"response_format": FORM, **more})
            for more in (
                {"guided_json": SCHEMA},
                {"guided_regex": "a"},
                {"structured_outputs": {"regex": "a"}},
                {"structured_outputs": {"json": {}}},
                {"function_call": {"name": "f"}},
            )
        ),
        ("chat", {"response_format": {"type": "structural_tag", "format": {}}}),
        ("chat", {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}),
        *(
            ("chat", {"structured_outputs": own})
            for own in (
                {"json": SCHEMA, "regex": "a"},
                {"json": SCHEMA, "whitespace_pattern": " "},
                {"structural_tag": "{}"},
                {"json_object": False},
                {"choice": ["a", 7]},
                "json",
            )
        ),
        ("chat", {"tool_choice": "required"}),
        *(
            ("chat", {"tools": CHAT_TOOLS, **more})
            for more in (
                {"tools": CHAT_TOOLS * 2, "tool_choice": "required"},
                {"tool_choice": "required", "parallel_tool_calls": "no"},
                {"tool_choice": "required", "parallel_tool_calls": 0},
                {"tool_choice": {"type": "allowed_tools"}},
                {"tool_choice": {"type": "function", "function": {"name": "h"}}},
                {"tools": [{"type": "custom", "custom": F}], "tool_choice": "required"},
            )
        ),
        ("responses", {"tools": [{"type": "web_search"}], "tool_choice": "required"}),
        ("responses", {"tools": [{"type": "custom", "name": "f"}], "tool_choice": "required"}),
        ("responses", {"text": "odd"}),
        (
            "messages",
            MESSAGE | {"thinking": "odd", "tools": MESSAGE_TOOLS, "tool_choice": {"type": "any"}},
        ),
    ],
)
def test_uncertain_grammar_is_not_recorded_and_not_trained(
    api: str, fields: dict[str, Any]
) -> None:
    found, reason = recorded(api, json.dumps({"model": "m", **fields}))
    assert "grammar" not in found
    odd = "odd" in fields.values()
    assert reason == ("unreadable_sampling" if odd else "constrained_sampling")


@pytest.mark.parametrize("more", [{}, {"response_format": {"type": "text"}, "tools": CHAT_TOOLS}])
def test_plain_request_has_no_grammar(more: dict[str, Any]) -> None:
    assert grammar("chat", more) is None


def test_definitions_of_one_name_must_be_equal() -> None:
    other = {"name": "g", "parameters": {"$defs": {"x": {"type": "string"}}}}
    tools = [{"type": "function", "function": one} for one in (F, other)]
    assert grammar("chat", {"tools": tools, "tool_choice": "required"}) is None
    odd = [{"type": "function", "function": {"name": "f", "parameters": {"$defs": 7}}}]
    assert grammar("chat", {"tools": odd, "tool_choice": "required"}) is None


def test_a_plain_request_is_not_asked_for_its_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    for wire_format in FORMATS.values():
        rules = wire_format.sampling
        monkeypatch.setattr(type(rules), "grammar", lambda *_: pytest.fail("asked"))
        sampling_settings({"tools": CHAT_TOOLS, "tool_choice": "auto"}, 1.0, rules)
        sampling_settings({"response_format": {"type": "text"}}, 1.0, rules)
