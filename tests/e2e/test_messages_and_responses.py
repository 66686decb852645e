"""Messages and responses on a real vLLM: what the SDKs read, and ids that are exact."""

import json
from typing import TYPE_CHECKING, Any
from uuid import UUID

import aiohttp
import pytest

from pawl.stack.stack import Stack
from store.database import make_engine
from store.ids import new_id
from store.records import TransitionRow
from store.values.tokens import unpack_ids, unpack_logprobs
from tests.e2e.conftest import POLICY, episodes_of
from tests.support.recordings import TRIES, cut_differently, normalised
from tests.support.waiting import awaited

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic

TOOL: Any = {
    "name": "calculator",
    "description": "Computes.",
    "input_schema": {"type": "object", "properties": {"expression": {"type": "string"}}},
}
QUESTION: Any = [
    {"role": "user", "content": "What is 23 * 47?"},
    {
        "role": "assistant",
        "content": [
            {
                "type": "tool_use",
                "id": "toolu_example_1",
                "name": "calculator",
                "input": {"expression": "23 * 47"},
            }
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_example_1", "content": "1081"},
            {"type": "text", "text": "What is 12 * 34?"},
        ],
    },
]
# The same in chat's words, written by hand.
CHAT_QUESTION: Any = [
    {"role": "system", "content": "Use the calculator."},
    {"role": "user", "content": "What is 23 * 47?"},
    {
        "role": "assistant",
        "tool_calls": [
            {
                "id": "toolu_example_1",
                "type": "function",
                "function": {"name": "calculator", "arguments": '{"expression": "23 * 47"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "toolu_example_1", "content": "1081"},
    {"role": "user", "content": "What is 12 * 34?"},
]
HI: Any = [{"role": "user", "content": "Say héllo"}]
COUNT: Any = [{"role": "user", "content": "Count to ten"}]
CALCULATE: Any = {"messages": QUESTION, "tools": [TOOL]}
ASKED: Any = {"model": POLICY, "max_tokens": 24, "temperature": 0.0}


def direct(stack: Stack) -> str:
    return f"http://127.0.0.1:{stack.plan.vllm.port}/v1"


def client_of(stack: Stack, episode: str) -> "AsyncAnthropic":
    # All workers collect this file: one of them runs it.
    from anthropic import AsyncAnthropic

    return AsyncAnthropic(
        base_url=stack.base_url.removesuffix("/v1"),
        api_key="unused",
        default_headers={"x-pawl-episode": episode},
    )


async def post(url: str, body: dict[str, Any], **headers: str) -> tuple[Any, Any]:
    """A reply's JSON and its headers."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json=body, headers=headers) as response,
    ):
        return json.loads(await response.read()), response.headers


async def recorded(stack: Stack, key: str, count: int = 1) -> list[TransitionRow]:
    """An episode's calls, as soon as all are stored."""
    engine = make_engine(stack.database_url)

    async def stored() -> list[TransitionRow]:
        async with engine.connect() as connection:
            return [call for one in await episodes_of(connection, [key]) for call in one.calls]

    try:
        calls = await awaited(stored, lambda calls: len(calls) >= count)
        assert len(calls) >= count, f"{key} has not {count} calls"
        return calls
    finally:
        await engine.dispose()


def served(call: TransitionRow) -> str:
    return f"{POLICY}@{call.policy_version}" if call.policy_version else POLICY


async def check_exact(stack: Stack, call: TransitionRow, chat: dict[str, Any]) -> None:
    """The call's tokens are those of the same conversation in vLLM's chat completions."""
    wanted, _ = await post(
        f"{direct(stack)}/chat/completions",
        chat | {"model": served(call), "logprobs": True, "return_token_ids": True},
    )
    [choice] = wanted["choices"]
    assert unpack_ids(call.tokens.prompt_ids) == wanted["prompt_token_ids"]
    assert unpack_ids(call.tokens.sampled_ids) == choice["token_ids"]
    logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
    assert unpack_logprobs(call.tokens.sampled_logprobs) == pytest.approx(logprobs, abs=2e-3)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_tool_using_message_has_exact_ids(stack: Stack, stream: bool) -> None:
    episode = str(new_id())
    told: Any = CALCULATE | {"model": POLICY, "max_tokens": 24, "system": "Use the calculator."}
    # The SDK names no temperature of its own.
    told |= {"extra_body": {"temperature": 0.0}}
    async with client_of(stack, episode) as client:
        if stream:
            async with client.messages.stream(**told) as events:
                pieces = [e.partial_json async for e in events if e.type == "input_json"]
                message = await events.get_final_message()
            assert len(pieces) > 1
        else:
            message = await client.messages.create(**told)
        [block] = message.content
        assert (message.model, message.stop_reason) == (POLICY, "tool_use")
        assert block.type == "tool_use"
        assert block.input == {"expression": "12 * 34"}
    [call] = await recorded(stack, episode)
    assert (call.status, call.reason) == ("complete", "greedy")
    assert json.loads(call.reply or b"")["content"][0]["id"] == block.id
    assert call.tool_calls[0].id == block.id
    tool = {"name": "calculator", "parameters": TOOL["input_schema"]}
    await check_exact(
        stack,
        call,
        {
            "messages": CHAT_QUESTION,
            "tools": [{"type": "function", "function": tool}],
            "max_tokens": 24,
            "temperature": 0.0,
        },
    )


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_message_of_text_is_trainable_and_tokenised_as_chat_is(
    stack: Stack, stream: bool
) -> None:
    episode = str(new_id())
    told: Any = {"model": POLICY, "max_tokens": 12, "system": "Be brief."}
    told |= {"messages": [{"role": "user", "content": "Say héllo"}]}
    async with client_of(stack, episode) as client:
        if stream:
            async with client.messages.stream(**told) as events:
                text = "".join([piece async for piece in events.text_stream])
                message = await events.get_final_message()
            assert text == "".join(b.text for b in message.content if b.type == "text")
        else:
            message = await client.messages.create(**told)
    [call] = await recorded(stack, episode)
    assert (call.trainable, call.reason) == (True, None)
    prompt = unpack_ids(call.tokens.prompt_ids)
    assert len(prompt) == message.usage.input_tokens
    assert len(unpack_ids(call.tokens.sampled_ids)) == message.usage.output_tokens
    messages = [{"role": "system", "content": "Be brief."}, *told["messages"]]
    tokens, _ = await post(
        f"{direct(stack)[:-3]}/tokenize", {"model": served(call), "messages": messages}
    )
    assert prompt == tokens["tokens"]


RESPONSES_TOOL: Any = {
    "type": "function",
    "name": "calculator",
    "parameters": TOOL["input_schema"],
}
RESPONSES_QUESTION: Any = [
    {"role": "system", "content": "Use the calculator."},
    {"role": "user", "content": "What is 23 * 47?"},
    {
        "type": "function_call",
        "call_id": "call_example_1",
        "name": "calculator",
        "arguments": '{"expression": "23 * 47"}',
    },
    {"type": "function_call_output", "call_id": "call_example_1", "output": "1081"},
    {"role": "user", "content": "What is 12 * 34?"},
]
SCENARIOS: dict[str, dict[str, Any]] = {
    "text": {"messages": HI},
    "system": {"messages": HI, "system": "Be brief."},
    "blocks": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Say hi"}]}],
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: 1"},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        ],
    },
    "tools": CALCULATE,
    "any tool": CALCULATE | {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
    "no tool": CALCULATE | {"tool_choice": {"type": "none"}},
    "stop": {"messages": COUNT, "stop_sequences": ["2", " first"]},
    "a system message amid": {"messages": [*HI, {"role": "system", "content": "Hurry."}]},
    "not thinking": {"messages": HI, "thinking": {"type": "disabled"}},
    "a form": {
        "messages": HI,
        "output_config": {
            "format": {
                "type": "json_schema",
                "schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
            }
        },
    },
    "sampling": {"messages": HI, "top_k": 1, "top_p": 0.9, "metadata": {"user_id": "u"}},
    "begun answer": {"messages": [*HI, {"role": "assistant", "content": "Hello"}]},
    "image": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {
                        "type": "image",
                        "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"},
                    }
                ],
            }
        ]
    },
    "response": {"input": "Say héllo"},
    "response of instructions": {
        "input": "Hi",
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
    },
    "response with a tool": {"input": RESPONSES_QUESTION, "tools": [RESPONSES_TOOL]},
    "response with log-probabilities": {
        "input": "Hi",
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    },
    "response with alternatives": {"input": "Hi", "top_logprobs": 50},
    "response with ids": {"input": "Hi", "enable_response_messages": True},
    "response of a form": {
        "input": "Hi",
        "text": {
            "format": {
                "type": "json_schema",
                "name": "x",
                "schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
            }
        },
    },
    "response refused": {"input": "Hi", "include": ["nothing"]},
}


# A call of a tool and a form are whole, and a stop is come by, in so many tokens; of plain text the
# first few show what the others do.
LONG, SHORT = 24, 8
NEED_LENGTH = {"tools", "any tool", "stop", "a form", "response with a tool", "response of a form"}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", SCENARIOS)
async def test_direct_and_proxied_are_the_same_bytes(stack: Stack, name: str, stream: bool) -> None:
    path, length = (
        ("responses", "max_output_tokens")
        if "response" in name
        else (
            "messages",
            "max_tokens",
        )
    )
    tokens = LONG if name in NEED_LENGTH else SHORT
    body = {"model": POLICY, "temperature": 0.0, length: tokens, "stream": stream} | SCENARIOS[name]
    for _ in range(TRIES):
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{stack.base_url}/{path}", json=body) as proxied:
                seen = await proxied.read()
            version = proxied.headers["x-pawl-policy"].removesuffix("@0")
            async with session.post(
                f"{direct(stack)}/{path}", json=body | {"model": version}
            ) as response:
                wanted = await response.read()
        if not cut_differently(seen, wanted):
            break
    asked = wanted.replace(b'"model":"%s"' % version.encode(), b'"model":"%s"' % POLICY.encode())
    assert (proxied.status, normalised(seen)) == (response.status, normalised(asked))


async def test_a_tools_result_joins_the_episode_without_a_header(stack: Stack) -> None:
    url = f"{stack.base_url}/messages"
    told = ASKED | {"messages": QUESTION, "tools": [TOOL], "system": "Use the calculator."}
    first, headers = await post(url, told)
    assert UUID(headers["x-pawl-call"])
    [block] = first["content"]
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "408"}
    turns = [
        *QUESTION,
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result]},
    ]
    _, again = await post(url, told | {"messages": turns})
    assert again["x-pawl-episode"] == headers["x-pawl-episode"]
    one, two = await recorded(stack, headers["x-pawl-episode"], 2)
    # What the first call saw and sampled begins the second call's prompt.
    begun = unpack_ids(one.tokens.prompt_ids) + unpack_ids(one.tokens.sampled_ids)
    assert unpack_ids(two.tokens.prompt_ids)[: len(begun)] == begun


async def test_what_chat_has_no_words_for_is_vllms_to_refuse(stack: Stack) -> None:
    document = {"type": "document", "source": {"type": "text", "data": "x"}}
    for body in (
        ASKED | {"messages": [{"role": "user", "content": [document]}]},
        ASKED | {"messages": [{"role": "user", "content": "x"}], "temperature": -1},
        ASKED | {"messages": [{"role": "user", "content": "x " * 3000}]},
        ASKED | {"messages": [{"role": "user", "content": "x"}], "model": "nobody"},
    ):
        wanted, _ = await post(f"{direct(stack)}/messages", body)
        seen, _ = await post(f"{stack.base_url}/messages", body)
        assert seen == wanted
        assert "error" in seen
