"""Replies through the proxy are vLLM's own, byte for byte, in all four APIs."""

from typing import Any

import pytest
import pytest_asyncio

from pawl.stack.stack import Stack
from tests.e2e.comparing import Reply, Scenarios, assert_same_bytes, cases_of, first_replies

HI: Any = [{"role": "user", "content": "Say héllo"}]
SCENARIOS: Scenarios = {
    "chat/completions": {
        "plain": {"messages": HI, "max_tokens": 12},
        "own logprobs": {"messages": HI, "logprobs": True, "top_logprobs": 2},
        "own ids": {"messages": HI, "return_token_ids": True},
        "two choices": {"messages": HI, "n": 2},
        "bad request": {"messages": HI, "max_tokens": -1},
        "no messages": {},
    },
    "completions": {
        "text": {"prompt": "The capital of France is"},
        "own logprobs": {"prompt": "Hello", "logprobs": 2},
        "two texts": {"prompt": ["Hello", "Good"]},
    },
    "messages": {
        "text": {"messages": HI},
        "system": {"messages": HI, "system": "Be brief."},
        "blocks": {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Say hi"}]}],
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: 1"},
                {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
            ],
        },
        "not thinking": {"messages": HI, "thinking": {"type": "disabled"}},
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
    },
    "responses": {
        "text": {"input": "Say héllo"},
        "instructions": {"input": "Hi", "instructions": "Be brief.", "metadata": {"a": "b"}},
        "log-probabilities": {
            "input": "Hi",
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
        },
        "alternatives": {"input": "Hi", "top_logprobs": 50},
        "ids": {"input": "Hi", "enable_response_messages": True},
        "refused": {"input": "Hi", "include": ["nothing"]},
    },
}
HURRY: Any = [*HI, {"role": "system", "content": "Hurry."}]
JOINED: Any = [
    {"role": "user", "content": "Say héllo\n\n<system-reminder>\nHurry.\n</system-reminder>"}
]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def replies(stack: Stack) -> dict[str, tuple[Reply, Reply]]:
    return await first_replies(stack, SCENARIOS)


@pytest.mark.parametrize("case", cases_of(SCENARIOS))
async def test_direct_and_proxied_replies_are_the_same_bytes(
    stack: Stack, replies: dict[str, tuple[Reply, Reply]], case: str
) -> None:
    path, body = cases_of(SCENARIOS)[case]
    await assert_same_bytes(stack, path, body, first=replies[case])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_mid_conversation_system_message_joins_the_previous_turn(
    stack: Stack, stream: bool
) -> None:
    """The one difference on purpose: vLLM moves the message to the front."""
    asked, joined = ({"messages": own, "stream": stream} for own in (HURRY, JOINED))
    await assert_same_bytes(stack, "messages", asked, joined)
