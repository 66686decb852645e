"""Responses on a real vLLM: ids that are exact."""

from typing import TYPE_CHECKING, Any

import pytest

from pawl.stack.stack import Stack
from store.ids import new_id
from store.values.packing import unpack_ids
from tests.e2e.asking import (
    CHAT_QUESTION,
    CHAT_TOOL,
    RESPONSES_QUESTION,
    RESPONSES_TOOL,
    check_exact,
    direct,
    post,
    recorded,
    served,
)
from tests.e2e.conftest import POLICY

if TYPE_CHECKING:
    from openai import AsyncOpenAI


def client_of(stack: Stack) -> "AsyncOpenAI":
    # All workers collect this file: one of them runs it.
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=stack.base_url, api_key="unused")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_response_is_recorded_with_exact_token_ids(stack: Stack, stream: bool) -> None:
    """Cut at its length, so that no token that ends it lacks its log-probability."""
    episode = str(new_id())
    told: Any = {"model": POLICY, "input": "Count to ten", "max_output_tokens": 9}
    told |= {"temperature": 0.0, "extra_headers": {"x-pawl-episode": episode}}
    async with client_of(stack) as client:
        if stream:
            async with client.responses.stream(**told) as events:
                pieces = [e.delta async for e in events if e.type == "response.output_text.delta"]
                response = await events.get_final_response()
            assert "".join(pieces) == response.output_text
        else:
            response = await client.responses.create(**told)
    assert (response.model, response.status) == (POLICY, "incomplete")
    assert not response.model_extra or response.model_extra["input_messages"] is None
    [call] = await recorded(stack, episode)
    assert (call.status, call.reason) == ("complete", "greedy")
    chat = {"messages": [{"role": "user", "content": "Count to ten"}], "max_tokens": 9}
    await check_exact(stack, call, chat | {"temperature": 0.0})


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_response_with_only_a_tool_call_is_trainable(stack: Stack, stream: bool) -> None:
    """vLLM gives no log-probability there, and all ids: those of the same chat."""
    episode = str(new_id())
    told: Any = {"model": POLICY, "input": RESPONSES_QUESTION, "tools": [RESPONSES_TOOL]}
    # Nearly greedy, so that a chat samples the same.
    told |= {"temperature": 0.01, "extra_body": {"seed": 7}}
    told["extra_headers"] = {"x-pawl-episode": episode}
    async with client_of(stack) as client:
        if stream:
            async with client.responses.stream(**told) as events:
                response = await events.get_final_response()
        else:
            response = await client.responses.create(**told)
    [item] = response.output
    assert item.type == "function_call"
    assert response.usage is not None
    [call] = await recorded(stack, episode)
    assert (call.trainable, call.reason) == (True, None)
    assert not call.tokens.sampled_logprobs
    ids = unpack_ids(call.tokens.sampled_ids)
    assert len(ids) == response.usage.output_tokens
    assert call.tool_calls[0].id == item.call_id
    chat: Any = {"model": served(call), "messages": CHAT_QUESTION}
    chat |= {"tools": [CHAT_TOOL]}
    wanted, _ = await post(
        f"{direct(stack)}/chat/completions",
        chat | {"temperature": 0.01, "seed": 7, "return_token_ids": True, "max_tokens": 64},
    )
    # The token that ended the reply among them.
    assert ids == wanted["choices"][0]["token_ids"]
    assert unpack_ids(call.tokens.prompt_ids) == wanted["prompt_token_ids"]
