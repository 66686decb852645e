"""Messages on a real vLLM: what the SDK reads, and ids that are exact."""

import json
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from pawl.stack.stack import Stack
from store.ids import new_id
from store.values.packing import unpack_ids
from tests.e2e.asking import (
    CHAT_QUESTION,
    CHAT_TOOL,
    QUESTION,
    TOOL,
    check_exact,
    direct,
    post,
    recorded,
    served,
)
from tests.e2e.conftest import POLICY

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic

ASKED: Any = {"model": POLICY, "max_tokens": 24, "temperature": 0.0}


def client_of(stack: Stack, episode: str) -> "AsyncAnthropic":
    # All workers collect this file: one of them runs it.
    from anthropic import AsyncAnthropic

    return AsyncAnthropic(
        base_url=stack.base_url.removesuffix("/v1"),
        api_key="unused",
        default_headers={"x-pawl-episode": episode},
    )


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_message_with_a_tool_call_is_recorded_with_exact_token_ids(
    stack: Stack, stream: bool
) -> None:
    episode = str(new_id())
    asked: Any = {"messages": QUESTION, "tools": [TOOL]} | {
        "model": POLICY,
        "max_tokens": 24,
        "system": "Use the calculator.",
    }
    # The SDK names no temperature of its own.
    asked |= {"extra_body": {"temperature": 0.0}}
    async with client_of(stack, episode) as client:
        if stream:
            async with client.messages.stream(**asked) as events:
                pieces = [e.partial_json async for e in events if e.type == "input_json"]
                message = await events.get_final_message()
            assert len(pieces) > 1
        else:
            message = await client.messages.create(**asked)
        [block] = message.content
        assert (message.model, message.stop_reason) == (POLICY, "tool_use")
        assert block.type == "tool_use"
        assert block.input == {"expression": "12 * 34"}
    [call] = await recorded(stack, episode)
    assert (call.status, call.reason) == ("complete", "greedy")
    assert json.loads(call.reply or b"")["content"][0]["id"] == block.id
    assert call.tool_calls[0].id == block.id
    chat = {"messages": CHAT_QUESTION, "tools": [CHAT_TOOL], "max_tokens": 24}
    await check_exact(stack, call, chat | {"temperature": 0.0})


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_text_message_is_trainable_and_tokenised_like_chat(
    stack: Stack, stream: bool
) -> None:
    episode = str(new_id())
    asked: Any = {"model": POLICY, "max_tokens": 12, "system": "Be brief."}
    asked |= {"messages": [{"role": "user", "content": "Say héllo"}]}
    async with client_of(stack, episode) as client:
        if stream:
            async with client.messages.stream(**asked) as events:
                text = "".join([piece async for piece in events.text_stream])
                message = await events.get_final_message()
            assert text == "".join(b.text for b in message.content if b.type == "text")
        else:
            message = await client.messages.create(**asked)
    [call] = await recorded(stack, episode)
    assert (call.trainable, call.reason) == (True, None)
    prompt = unpack_ids(call.tokens.prompt_ids)
    assert len(prompt) == message.usage.input_tokens
    assert len(unpack_ids(call.tokens.sampled_ids)) == message.usage.output_tokens
    messages = [{"role": "system", "content": "Be brief."}, *asked["messages"]]
    tokens, _ = await post(
        f"{direct(stack)[:-3]}/tokenize", {"model": served(call), "messages": messages}
    )
    assert prompt == tokens["tokens"]


async def test_call_with_a_tool_result_joins_the_tool_calls_episode_without_a_header(
    stack: Stack,
) -> None:
    url = f"{stack.base_url}/messages"
    asked = ASKED | {"messages": QUESTION, "tools": [TOOL], "system": "Use the calculator."}
    first, headers = await post(url, asked)
    assert UUID(headers["x-pawl-call"])
    [block] = first["content"]
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "408"}
    turns = [
        *QUESTION,
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result]},
    ]
    _, again = await post(url, asked | {"messages": turns})
    assert again["x-pawl-episode"] == headers["x-pawl-episode"]
    one, two = await recorded(stack, headers["x-pawl-episode"], 2)
    # What the first call saw and sampled begins the second call's prompt.
    begun = unpack_ids(one.tokens.prompt_ids) + unpack_ids(one.tokens.sampled_ids)
    assert unpack_ids(two.tokens.prompt_ids)[: len(begun)] == begun


async def test_invalid_messages_request_gets_vllms_own_error_through_the_proxy(
    stack: Stack,
) -> None:
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
