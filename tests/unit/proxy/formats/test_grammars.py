"""A grammar of which it is not certain which it is: not recorded, and its call not trained.

Grammars that are certain are compared with those of a real vLLM (`test_vllm_grammars`).
"""

import json
from typing import Any

import pytest

from tests.support.proxy.grammars import FORM, SCHEMA, TOOLS, F, recorded
from tests.support.recordings import PLAIN

OTHER = {"type": "function", "function": {"name": "g", "parameters": {"$defs": {"x": {"a": 1}}}}}
NO_DEFS = {"type": "function", "function": {"name": "f", "parameters": {"$defs": 7}}}
MESSAGE_TOOLS = [{"name": "f", "input_schema": SCHEMA}]


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        ("chat", {"response_format": FORM, "tools": TOOLS}),
        ("chat", {"response_format": FORM, "tools": TOOLS, "tool_choice": "required"}),
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
            ("chat", {"tools": TOOLS, **more})
            for more in (
                {"tools": TOOLS * 2, "tool_choice": "required"},
                {"tool_choice": "required", "parallel_tool_calls": "no"},
                {"tool_choice": "required", "parallel_tool_calls": 0},
                {"tool_choice": {"type": "allowed_tools"}},
                {"tool_choice": {"type": "function", "function": {"name": "h"}}},
                {"tools": [{"type": "custom", "custom": F}], "tool_choice": "required"},
                # Definitions of one name must be equal.
                {"tools": [TOOLS[0], OTHER], "tool_choice": "required"},
                {"tools": [NO_DEFS], "tool_choice": "required"},
            )
        ),
        ("responses", {"tools": [{"type": "web_search"}], "tool_choice": "required"}),
        ("responses", {"tools": [{"type": "custom", "name": "f"}], "tool_choice": "required"}),
        ("responses", {"text": "odd"}),
        (
            "messages",
            {"thinking": "odd", "tools": MESSAGE_TOOLS, "tool_choice": {"type": "any"}},
        ),
    ],
)
def test_uncertain_grammar_is_not_recorded_and_not_trained(
    api: str, fields: dict[str, Any]
) -> None:
    found, reason = recorded(api, json.dumps(PLAIN[api] | fields))
    assert "grammar" not in found
    odd = "odd" in fields.values()
    assert reason == ("unreadable_sampling" if odd else "constrained_sampling")
