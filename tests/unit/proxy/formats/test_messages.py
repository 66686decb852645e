"""A trained policy's messages: said in chat's words, and the answer in Anthropic's."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.formats.base import read_request
from proxy.formats.messages import MESSAGES, SHARED_FIELDS, chat_request
from proxy.trainable import sampling_settings
from tests.support.recordings import PLAIN, VERSION, rewritten

HI = PLAIN["messages"]
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}}
IMAGE_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aa"}}
TOOL = {"name": "calc", "input_schema": {"properties": {}}, "cache_control": {"type": "ephemeral"}}
CHAT_TOOL = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": None,
        "parameters": {"properties": {}, "type": "object"},
    },
}


def messages_of(*messages: Any, **fields: Any) -> Any:
    request = rewritten("messages", **fields, **({"messages": messages} if messages else {}))
    return json.loads(request.body)["messages"]


def test_messages_request_goes_to_chat_completions_and_asks_for_token_ids() -> None:
    asked = {"stream": True, "metadata": {"user_id": "u"}, "temperature": 0.5}
    request = rewritten("messages", **asked)
    assert request.path == "/v1/chat/completions"
    assert request.injected
    assert json.loads(request.body) == {
        "model": VERSION,
        "max_tokens": 9,
        "temperature": 0.5,
        "messages": HI["messages"],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "logprobs": True,
        "return_token_ids": True,
    }


def test_messages_request_keeps_its_path_and_fields_if_no_token_ids_are_wanted() -> None:
    request = rewritten("messages", want_ids=False)
    assert request.path is None
    assert json.loads(request.body) == HI | {"model": VERSION}


SYSTEMS: list[tuple[Any, list[str]]] = [
    ("Be brief.", ["Be brief."]),
    ("", []),
    ([], []),
    (None, []),
    ([{"type": "text", "text": "a", "cache_control": {}}, {"type": "text", "text": "b"}], ["ab"]),
    ([{"type": "text", "text": "x-anthropic-billing-header: 1"}], []),
]


@pytest.mark.parametrize(("system", "said"), SYSTEMS)
def test_system_field_becomes_system_messages(system: Any, said: list[str]) -> None:
    first = [m["content"] for m in messages_of(system=system) if m["role"] == "system"]
    assert first == said


def test_turn_with_tools_thoughts_and_images_is_translated_to_chat_messages() -> None:
    said = messages_of(
        {"role": "user", "content": [{"type": "text", "text": "see"}, IMAGE]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I'll count."},
                {"type": "tool_use", "id": "t1", "name": "calc", "input": {"a": "\u00e9"}},
                {"type": "tool_use", "id": "t2", "name": "calc", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "go on"},
                {"type": "tool_result", "tool_use_id": "t1", "content": "4", "is_error": True},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "content": [
                        {"type": "text", "text": "a"},
                        {"type": "text", "text": "b"},
                        IMAGE,
                    ],
                },
            ],
        },
        {"role": "system", "content": "Hurry."},
    )
    calls = [
        {
            "id": "t1",
            "type": "function",
            "function": {"name": "calc", "arguments": '{"a": "\\u00e9"}'},
        },
        {"id": "t2", "type": "function", "function": {"name": "calc", "arguments": "{}"}},
    ]
    assert said == [
        {"role": "user", "content": [{"type": "text", "text": "see"}, IMAGE_PART]},
        {"role": "assistant", "reasoning": "hm", "tool_calls": calls, "content": "I'll count."},
        {"role": "tool", "tool_call_id": "t1", "content": "4"},
        {"role": "tool", "tool_call_id": "t2", "content": "a\nb"},
        {"role": "user", "content": [IMAGE_PART]},
        {"role": "user", "content": f"go on\n\n{REMINDER}"},
    ]


def test_turn_of_tool_results_alone_makes_no_user_message() -> None:
    result = {"type": "tool_result", "tool_use_id": "t1"}
    assert messages_of({"role": "user", "content": [result]}) == [
        {"role": "tool", "tool_call_id": "t1", "content": ""}
    ]


HURRY = {"role": "system", "content": "Hurry."}
REMINDER = "<system-reminder>\nHurry.\n</system-reminder>"
ASKS = {"role": "user", "content": "q"}
SAYS = {"role": "assistant", "content": "a"}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "4"}
TOOL_SAYS = {"role": "tool", "tool_call_id": "t1"}
# Messages with one of the system's among them, and the chat for a template that takes none there.
INLINE: dict[str, tuple[list[Any], list[Any]]] = {
    "after a user's text": (
        [ASKS, HURRY, SAYS],
        [{"role": "user", "content": f"q\n\n{REMINDER}"}, SAYS],
    ),
    "after a user's image": (
        [{"role": "user", "content": [IMAGE]}, HURRY],
        [{"role": "user", "content": [IMAGE_PART, {"type": "text", "text": REMINDER}]}],
    ),
    "after a tool's result": (
        [{"role": "user", "content": [RESULT]}, HURRY],
        [TOOL_SAYS | {"content": f"4\n\n{REMINDER}"}],
    ),
    "after the assistant": (
        [ASKS, SAYS, HURRY, ASKS],
        [ASKS, SAYS, {"role": "user", "content": REMINDER}, ASKS],
    ),
    "twice": (
        [ASKS, HURRY, HURRY],
        [{"role": "user", "content": f"q\n\n{REMINDER}\n\n{REMINDER}"}],
    ),
    "first": ([HURRY, ASKS], [HURRY, ASKS]),
}


@pytest.mark.parametrize(("messages", "said"), INLINE.values(), ids=INLINE)
def test_inline_system_message_joins_the_turn_before_it(
    messages: list[Any], said: list[Any]
) -> None:
    request = chat_request(HI | {"messages": messages})
    assert request is not None
    assert request["messages"] == said


def test_system_message_before_all_turns_joins_the_system_field() -> None:
    messages = messages_of(HURRY, ASKS, system="Be brief.")
    assert messages == [{"role": "system", "content": "Be brief.\n\nHurry."}, ASKS]


@pytest.mark.parametrize("messages", [one for one, _ in INLINE.values()], ids=INLINE)
def test_inline_system_message_stays_where_the_template_shows_it(messages: list[Any]) -> None:
    request = chat_request(HI | {"system": "Be brief.", "messages": messages}, keep_system=True)
    roles = {"user": "user", "assistant": "assistant", "system": "system"}
    assert request is not None
    said = ["tool" if one["role"] == "tool" else roles[one["role"]] for one in request["messages"]]
    asked = ["tool" if one["content"] == [RESULT] else one["role"] for one in messages]
    assert said == ["system", *asked]


def test_inline_system_message_stays_only_after_a_leading_system_message() -> None:
    request = chat_request(HI | {"messages": [ASKS, HURRY]}, keep_system=True)
    assert request is not None
    assert request["messages"] == [{"role": "user", "content": f"q\n\n{REMINDER}"}]


def test_only_requests_with_inline_system_messages_depend_on_the_template() -> None:
    def depends(*messages: Any) -> bool:
        return MESSAGES.has_inline_system(
            read_request(json.dumps(HI | {"messages": messages}).encode())
        )

    assert depends(ASKS, HURRY)
    assert not depends(ASKS, SAYS)
    assert not depends(7, {"role": ["system"]})
    assert not MESSAGES.has_inline_system(read_request(b'{"messages": 7}'))
    assert not MESSAGES.has_inline_system(read_request(b"{"))


def change(kind: str, **tool: Any) -> dict[str, Any]:
    return {"type": kind, "tool": tool}


OTHER = TOOL | {"name": "other"}
CHAT_OTHER = {"type": "function", "function": CHAT_TOOL["function"] | {"name": "other"}}
ADDED = change("tool_addition", type="tool_definition", definition=OTHER)
REMOVED = change("tool_removal", type="tool_reference", name="calc")
DEFERRED = TOOL | {"defer_loading": True}
# Changes of tools, by the system messages that make them, and the tools that remain.
CHANGES: list[tuple[list[Any], list[Any], list[Any] | None]] = [
    ([TOOL], [[ADDED]], [CHAT_TOOL, CHAT_OTHER]),
    ([TOOL], [[REMOVED]], None),
    ([TOOL, OTHER], [[REMOVED]], [CHAT_OTHER]),
    (
        [TOOL, OTHER],
        [[REMOVED], [change("tool_addition", type="tool_reference", name="calc")]],
        [CHAT_TOOL, CHAT_OTHER],
    ),
    ([DEFERRED], [[change("tool_addition", type="tool_reference", name="calc")]], [CHAT_TOOL]),
    ([], [[{"type": "text", "text": "New."}, ADDED]], [CHAT_OTHER]),
]


@pytest.mark.parametrize(("tools", "changes", "left"), CHANGES)
def test_tool_changes_in_system_messages_change_the_requests_tools(
    tools: list[Any], changes: list[Any], left: list[Any] | None
) -> None:
    messages = [ASKS, *({"role": "system", "content": blocks} for blocks in changes)]
    asked = HI | {"system": "Hi.", "messages": messages, "tools": tools}
    request = chat_request(asked, keep_system=True)
    assert request is not None
    assert request.get("tools") == left
    # A change is no message of its own.
    texts = [one["content"] for one in request["messages"]]
    assert texts == ["Hi.", "q", *(block["text"] for block in changes[0] if "text" in block)]


def test_strict_tool_added_by_a_system_message_is_in_the_sampling_settings() -> None:
    strict = change("tool_addition", type="tool_definition", definition=OTHER | {"strict": True})
    messages = [ASKS, {"role": "system", "content": [strict]}]
    settings = sampling_settings(HI | {"messages": messages}, 1.0, MESSAGES.sampling)
    assert settings["strict_tools"] is True


CHOICES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"tools": [TOOL]}, {"tool_choice": "auto", "tools": [CHAT_TOOL]}),
    ({"tools": []}, {}),
    ({"tools": [], "tool_choice": {"type": "auto"}}, {}),
    ({"tool_choice": {"type": "none"}}, {}),
    (
        {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        {"tools": [CHAT_TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "auto"}},
        {"tools": [CHAT_TOOL], "tool_choice": "auto", "parallel_tool_calls": True},
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "calc"}},
        {
            "tools": [CHAT_TOOL],
            "tool_choice": {"type": "function", "function": {"name": "calc"}},
            "parallel_tool_calls": True,
        },
    ),
    ({"stop_sequences": ["a"]}, {"stop": ["a"]}),
    ({"top_k": 5, "top_p": 0.9, "temperature": None}, {"top_k": 5, "top_p": 0.9}),
    # The SDK's tool runner asks for a thread of the server's; vLLM keeps none.
    ({"thread": {"type": "create"}}, {}),
    ({"thread": {"type": "continue", "previous_message_id": "chatcmpl-1"}}, {}),
    ({"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}),
    ({"thinking": {"type": "adaptive"}}, {}),
    (
        {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000},
        {"thinking_token_budget": 1024, "max_tokens": 2000},
    ),
    ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "json_schema", "schema": {"type": "object"}},
            }
        },
    ),
]


@pytest.mark.parametrize(("fields", "said"), CHOICES)
def test_fields_of_a_messages_request_are_translated_to_chat_fields(
    fields: dict[str, Any], said: dict[str, Any]
) -> None:
    assert chat_request(HI | fields) == HI | said


USER = {"role": "user"}
INEXPRESSIBLE: list[dict[str, Any]] = [
    {"messages": [USER | {"content": [{"type": "document", "source": {}}]}]},
    {"messages": [USER | {"content": [{"type": "image", "source": {"type": "file"}}]}]},
    {"messages": [USER | {"content": [{"type": "tool_use", "id": "x", "name": "y"}]}]},
    {"messages": [USER | {"content": [{"type": ["text"]}]}]},
    {"messages": [USER | {"content": 7}]},
    {"messages": [USER | {"content": [{"type": "text", "text": None}]}]},
    {"messages": [{"role": "tool", "content": "x"}]},
    {"messages": [USER | {"content": "x", "name": "y"}]},
    {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
    {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "y"}]}]},
    {
        "messages": [
            USER
            | {"content": [{"type": "tool_result", "tool_use_id": "x", "content": [{"type": "d"}]}]}
        ]
    },
    {"messages": "x"},
    *(
        {"tools": [TOOL], "messages": [ASKS, {"role": role, "content": [block]}]}
        for role, block in (
            ("user", ADDED),
            ("system", {"type": "tool_addition"}),
            ("system", change("tool_addition", type="tool_reference", name="unknown")),
            ("system", change("tool_addition", type="tool_reference", name=["calc"])),
            ("system", change("tool_addition", type="tool_definition", definition={})),
            ("system", change("tool_removal", type="tool_definition", definition=TOOL)),
            ("system", {"type": "image", "source": {}}),
        )
    ),
    {"system": [ADDED]},
    {"max_tokens": 0},
    {"max_tokens": True},
    {"max_tokens": "9"},
    {"model": 5},
    {"stream": "yes"},
    {"system": [{"type": "image"}]},
    {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
    {"tools": [{"name": "x"}]},
    {"tools": {"a": 1}},
    {"tools": [TOOL], "tool_choice": {"type": "tool"}},
    {"tool_choice": {"type": "any"}},
    {"tool_choice": {"type": ["auto"]}},
    {"tool_choice": "auto"},
    {"thinking": {"type": "enabled", "budget_tokens": 1000}, "max_tokens": 2000},
    {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    {"thinking": {"type": "wild"}},
    {"output_config": {"format": {"type": "xml"}}},
    {"output_config": {"effort": "huge"}},
    {"seed": 7},
    {"mcp_servers": []},
    {"kv_transfer_params": {}},
]


@pytest.mark.parametrize("fields", INEXPRESSIBLE, ids=json.dumps)
def test_request_that_chat_cannot_express_is_forwarded_untranslated(fields: dict[str, Any]) -> None:
    request = rewritten("messages", **fields)
    assert (request.path, request.injected) == (None, frozenset())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3000) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "text", "input", "source", "name", "id"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)


@given(
    st.dictionaries(st.sampled_from(sorted(HI | {"tools": 0, "system": 0, "thinking": 0})), JSON)
)
def test_any_messages_request_is_translated_validly_or_not_at_all(fields: dict[str, Any]) -> None:
    asked = HI | fields
    request = chat_request(asked)
    # What cannot be expressed is forwarded as it is; what is translated loses no field unseen.
    if request is not None:
        assert json.loads(json.dumps(request)) == request
        assert request["model"] == asked["model"]
        assert all(message["role"] for message in request["messages"])
        assert set(request) >= {name for name in SHARED_FIELDS if asked.get(name) is not None}
