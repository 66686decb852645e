"""A trained policy's messages: said in chat's words, and the answer in Anthropic's."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.formats.base import ModelRequest
from proxy.formats.messages.as_chat import SAME, chat_request
from proxy.formats.messages.messages import CHAT_PATH, MESSAGES
from proxy.formats.messages.readers import StreamedMessageReader, WholeMessageReader
from proxy.formats.requests import read_request

HI: dict[str, Any] = {
    "model": "agent",
    "max_tokens": 9,
    "messages": [{"role": "user", "content": "h\u00e9"}],
}
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


def rewritten(fields: dict[str, Any], *, want_ids: bool = True) -> ModelRequest:
    body = json.dumps(HI | fields).encode()
    return MESSAGES.rewrite(read_request(body), "agent@3", want_ids=want_ids)


def told(**fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(rewritten(fields).body)
    return found


def messages_of(*messages: Any, **fields: Any) -> Any:
    return told(messages=list(messages), **fields)["messages"]


def test_the_request_goes_to_chat_completions_and_asks_for_ids() -> None:
    request = rewritten({"stream": True, "metadata": {"user_id": "u"}, "temperature": 0.5})
    assert request.path == CHAT_PATH
    assert request.injected
    assert json.loads(request.body) == {
        "model": "agent@3",
        "max_tokens": 9,
        "temperature": 0.5,
        "messages": [{"role": "user", "content": "h\u00e9"}],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "logprobs": True,
        "return_token_ids": True,
    }


def test_without_ids_it_is_forwarded_as_it_is() -> None:
    request = rewritten({}, want_ids=False)
    assert request.path is None
    assert json.loads(request.body) == HI | {"model": "agent@3"}


SYSTEMS: list[tuple[Any, list[str]]] = [
    ("Be brief.", ["Be brief."]),
    ("", []),
    ([], []),
    (None, []),
    ([{"type": "text", "text": "a", "cache_control": {}}, {"type": "text", "text": "b"}], ["ab"]),
    ([{"type": "text", "text": "x-anthropic-billing-header: 1"}], []),
]


@pytest.mark.parametrize(("system", "said"), SYSTEMS)
def test_system(system: Any, said: list[str]) -> None:
    first = [m["content"] for m in told(system=system)["messages"] if m["role"] == "system"]
    assert first == said


def test_a_turn_with_tools_thoughts_and_images() -> None:
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
        {"role": "user", "content": "go on"},
        {"role": "system", "content": "Hurry."},
    ]


def test_results_alone_make_no_message_of_the_users() -> None:
    result = {"type": "tool_result", "tool_use_id": "t1"}
    assert messages_of({"role": "user", "content": [result]}) == [
        {"role": "tool", "tool_call_id": "t1", "content": ""}
    ]


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
def test_what_each_field_becomes(fields: dict[str, Any], said: dict[str, Any]) -> None:
    base = {"model": "agent", "max_tokens": 9, "messages": HI["messages"]}
    assert chat_request(HI | fields) == base | said


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
def test_what_chat_has_no_words_for_is_forwarded_as_it_is(fields: dict[str, Any]) -> None:
    request = rewritten(fields)
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
def test_no_request_breaks_the_rewriting(fields: dict[str, Any]) -> None:
    told = HI | fields
    request = chat_request(told)
    # What cannot be expressed is forwarded as it is; what is translated loses no field unseen.
    if request is not None:
        assert json.loads(json.dumps(request)) == request
        assert request["model"] == told["model"]
        assert request["messages"]
        assert set(request) >= {name for name in SAME if told.get(name) is not None}


def chunk(delta: dict[str, Any], *ids: int, **choice: Any) -> dict[str, Any]:
    tokens = {"token_ids": list(ids), "logprobs": {"content": [{"logprob": -0.5} for _ in ids]}}
    told = {"index": 0, "delta": delta, "finish_reason": None} | (tokens if ids else {}) | choice
    return {"id": "chatcmpl-1", "model": "agent@3", "choices": [told]}


HEAD = chunk({"role": "assistant", "content": ""}) | {"prompt_token_ids": [1, 2]}
USAGE = {"id": "chatcmpl-1", "choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}


def sse(*chunks: dict[str, Any]) -> bytes:
    return b"".join(b"data: " + json.dumps(c).encode() + b"\n\n" for c in chunks)


def streamed(data: bytes) -> tuple[list[dict[str, Any]], StreamedMessageReader]:
    reply = StreamedMessageReader(rewritten({"stream": True}), "agent@3")
    out = reply.feed(data) + reply.finish()
    blocks = [block.split(b"\n") for block in out.split(b"\n\n")[:-1]]
    events = [json.loads(lines[1][6:]) for lines in blocks if not lines[0].startswith(b":")]
    assert [lines[0][7:].decode() for lines in blocks if lines[0][:1] == b"e"] == [
        event["type"] for event in events
    ]
    return events, reply


def call(index: int, **told: Any) -> dict[str, Any]:
    return {"tool_calls": [{"index": index} | told]}


def test_text_between_and_after_tool_calls_waits_for_their_end() -> None:
    events, reply = streamed(
        sse(
            HEAD,
            chunk({"content": "a"}, 3),
            chunk(call(0, id="t1", function={"name": "calc", "arguments": '{"a"'}), 4),
            chunk({"content": "b"}),
            chunk(call(0, function={"arguments": ": 1}"})),
            chunk(call(1, id="t2", function={"name": "calc", "arguments": "{}"}), 5),
            chunk({}, finish_reason="tool_calls"),
            USAGE,
        )
        + b"data: [DONE]\n\n"
    )
    content = json.loads(reply.facts().reply or b"")["content"]
    assert content == [
        {"type": "text", "text": "a"},
        {"type": "tool_use", "id": "t1", "name": "calc", "input": {"a": 1}},
        {"type": "text", "text": "b"},
        {"type": "tool_use", "id": "t2", "name": "calc", "input": {}},
    ]
    assert [e["index"] for e in events if e["type"] == "content_block_start"] == [0, 1, 2, 3]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    sampled = reply.facts().sampled
    assert (sampled.prompt_ids, sampled.sampled_ids) == ((1, 2), (3, 4, 5))
    assert [c.id for c in reply.summary().tool_calls] == ["t1", "t2"]


@pytest.mark.parametrize(
    ("finish", "stop", "arguments", "reason"),
    [
        ("stop", None, None, ("end_turn", None)),
        ("stop", 2, None, ("end_turn", None)),
        ("stop", "END", None, ("stop_sequence", "END")),
        ("length", None, None, ("max_tokens", None)),
        ("length", None, "{}", ("max_tokens", None)),
        ("stop", "END", "{}", ("tool_use", None)),
        ("stop", "END", '{"a', ("stop_sequence", "END")),
        ("tool_calls", None, '{"a', ("tool_use", None)),
        ("abort", None, None, (None, None)),
    ],
)
def test_stop_reasons(finish: str, stop: Any, arguments: str | None, reason: Any) -> None:
    calls = (
        []
        if arguments is None
        else [call(0, id="t", function={"name": "c", "arguments": arguments})]
    )
    last = chunk({}, finish_reason=finish, stop_reason=stop)
    events, _ = streamed(sse(HEAD, *(chunk(c) for c in calls), last, USAGE))
    assert tuple(events[-1]["delta"].values()) == reason


def test_the_last_event_is_held_back_and_comments_pass() -> None:
    reply = StreamedMessageReader(rewritten({}), "agent@3")
    sent = reply.feed(sse(HEAD, USAGE) + b": still here\r\n\r\ndata: [DONE]\n\n")
    assert b"message_delta" in sent
    assert sent.endswith(b": still here\n\n")
    assert reply.finish() == b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'data: {"error": {"message": "out of memory", "code": 500}}\n\n', "out of memory"),
        (b'data: {"object": "error", "message": "gone"}\n\n', "gone"),
        (b"data: <html>\n\n", "not a chunk of a chat completion"),
        (b'data: {"choices": [7]}\n\n', "not a chunk of a chat completion"),
        (
            b'data: {"choices":[{"delta":{"content":"\\ud83d"}}]}\n\n',
            "not a chunk of a chat completion",
        ),
    ],
)
def test_an_error_in_a_stream_is_anthropics_and_ends_it(data: bytes, message: str) -> None:
    events, reply = streamed(sse(HEAD) + data + sse(USAGE) + b"data: [DONE]\n\n")
    assert events[-1]["type"] == "error"
    assert message in events[-1]["error"]["message"]
    assert not reply.facts().whole


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (
            {"error": {"message": "no", "type": "NotFoundError", "code": 404}},
            "not_found_error",
            "no",
        ),
        (
            {"object": "error", "message": "old", "type": "X", "code": 400},
            "invalid_request_error",
            "old",
        ),
        (
            {"error": {"message": "kind", "type": "BadRequestError", "code": None}},
            "invalid_request_error",
            "kind",
        ),
        ({"error": {"message": "bare"}}, "api_error", "bare"),
    ],
)
def test_errors_take_anthropics_shape(body: Any, kind: str, message: str) -> None:
    reply = WholeMessageReader(rewritten({}), "agent@3")
    reply.feed(json.dumps(body).encode())
    wanted = {"type": "error", "error": {"type": kind, "message": message}}
    assert json.loads(reply.finish()) == wanted


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (408, "timeout_error"),
        (409, "conflict_error"),
        (413, "request_too_large"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (501, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
        (507, "api_error"),
        (529, "overloaded_error"),
    ],
)
def test_an_errors_type_is_that_of_its_status(status: int, kind: str) -> None:
    """Whole, by the reply's own status; in a stream, where there is none, by vLLM's code."""
    said = {"message": "no", "type": "SomeError", "param": None, "code": status}
    whole = MESSAGES.whole_reader(rewritten({}), "agent@3", status=status)
    whole.feed(json.dumps({"error": said | {"code": "word"}}).encode())
    wanted = {"type": "error", "error": {"type": kind, "message": "no"}}
    assert json.loads(whole.finish()) == wanted
    events, _ = streamed(sse(HEAD, {"error": said}))
    assert events[-1] == wanted


def test_an_error_in_a_stream_without_a_code_has_the_type_of_vllms_class() -> None:
    events, _ = streamed(sse(HEAD, {"error": {"message": "no", "type": "NotFoundError"}}))
    assert events[-1]["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    "body", [b"<html>502</html>", b"", b"\xff", b"[1]", b'{"a": 1}', b'{"choices": [7]}']
)
def test_what_is_no_chat_completion_passes_byte_for_byte(body: bytes) -> None:
    reply = WholeMessageReader(rewritten({}), "agent@3")
    reply.feed(body)
    assert reply.finish() == body
    reply.facts()


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        (
            '{"a": {"b": 1.0}, "n": 123456789012345678901234567890}',
            '{"a":{"b":1.0},"n":123456789012345678901234567890}',
        ),
        ('{"e": "\\ud83d", "u": "\\u00e9"}', '{"e":"\\ud83d","u":"\u00e9"}'),
        ('{"cut', "{}"),
        ("[1]", "{}"),
        ('{"x": NaN}', "{}"),
        ("[" * 100_000, "{}"),
    ],
)
def test_arguments_reach_the_client_as_vllm_writes_them(arguments: str, seen: str) -> None:
    function = {"name": "calc", "arguments": arguments}
    message = {"content": None, "tool_calls": [{"id": "t", "function": function}]}
    body = {
        "id": "c",
        "model": "agent@3",
        "choices": [{"message": message, "finish_reason": "stop"}],
    }
    reply = WholeMessageReader(rewritten({}), "agent@3")
    reply.feed(json.dumps(body).encode())
    assert f'"input":{seen}'.encode() in reply.finish()


@given(st.binary(max_size=300))
def test_any_bytes_become_events_or_nothing(data: bytes) -> None:
    reply = StreamedMessageReader(rewritten({"stream": True}), "agent@3")
    out = reply.feed(data) + reply.finish()
    assert out == b"" or out.endswith(b"\n\n")
    reply.facts()
    reply.summary()
