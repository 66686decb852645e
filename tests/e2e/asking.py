"""One question with a tool in the words of each API; ask it, and read what was recorded of it."""

import json
from typing import Any

import aiohttp
import pytest

from pawl.stack.stack import Stack
from store.database import make_engine
from store.records import TransitionRow
from store.values.packing import unpack_ids, unpack_logprobs
from tests.e2e.conftest import POLICY, episodes_of
from tests.support.waiting import awaited

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
CHAT_TOOL: Any = {
    "type": "function",
    "function": {"name": "calculator", "parameters": TOOL["input_schema"]},
}
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


def direct(stack: Stack) -> str:
    return f"http://127.0.0.1:{stack.plan.vllm.port}/v1"


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
