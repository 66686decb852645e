"""Responses on a real vLLM: exact ids, and log-probabilities from the version that sampled."""

from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec
import pytest

from pawl.stack.stack import Stack
from store.database import make_engine
from store.ids import new_id
from store.values.packing import unpack_ids, unpack_logprobs
from store.version_queries import list_versions
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
from tests.support.training import rows
from trainer.learners.learner import Learner

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


async def test_sampling_version_reproduces_the_servers_log_probabilities(
    stack: Stack, learner: Learner
) -> None:
    """Of a whole text, which has them all: equal to 1e-3 in float32."""
    sampled, told, versions = [], [], []
    for number, question in enumerate(("Count to ten", "What is 12 * 34?", "Say héllo")):
        body = {"model": POLICY, "input": question, "temperature": 1.0, "max_output_tokens": 24}
        body["seed"] = number
        _, headers = await post(f"{stack.base_url}/responses", body)
        [call] = await recorded(stack, headers["x-pawl-episode"])
        assert call.trainable
        # Another test may have published versions on this stack by now.
        versions.append(call.policy_version or 0)
        told.append(unpack_logprobs(call.tokens.sampled_logprobs))
        sampled.append(
            msgspec.structs.replace(
                rows()[0],
                episode_id=UUID(int=number),
                prompt_ids=tuple(unpack_ids(call.tokens.prompt_ids)),
                sampled_ids=tuple(unpack_ids(call.tokens.sampled_ids)),
                sampled_logprobs=(),
                recomputed=True,
            )
        )
    engine = make_engine(stack.database_url)
    async with engine.connect() as connection:
        folders = {v.version: v.adapter_path for v in await list_versions(connection, POLICY)}
    await engine.dispose()
    for row, version, theirs in zip(sampled, versions, told, strict=True):
        path = folders[version]
        [ours] = learner.version_logprobs(None if path is None else Path(path), [row])
        assert ours == pytest.approx(theirs, abs=1e-3)
