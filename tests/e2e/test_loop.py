"""What comes through the proxy is what vLLM says, byte for byte."""

import re
from collections.abc import Mapping
from typing import Any

import aiohttp
import pytest

from pawl.stack.stack import Stack
from tests.e2e.conftest import POLICY
from tests.support.recordings import TRIES, cut_differently

TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}
EXAMPLE = [
    {"role": "system", "content": "Use the calculator."},
    {"role": "user", "content": "What is 23 * 47?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_0",
                "type": "function",
                "function": {"name": "calculator", "arguments": '{"expression": "23 * 47"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_0", "content": "1081"},
    {"role": "user", "content": "What is 12 * 34?"},
]
SCENARIOS: dict[str, Mapping[str, Any]] = {
    "plain": {"messages": [{"role": "user", "content": "Say héllo"}], "max_tokens": 12},
    "tools": {"messages": EXAMPLE, "tools": [TOOL], "max_tokens": 24},
    "own logprobs": {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 4,
        "logprobs": True,
        "top_logprobs": 2,
    },
    "own ids": {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 4,
        "return_token_ids": True,
    },
    "two choices": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "n": 2},
    "stop": {"messages": [{"role": "user", "content": "Count to five"}], "stop": ["3", "."]},
    "bad request": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": -1},
    "no messages": {},
    "text": {"prompt": "The capital of France is", "max_tokens": 8},
    "text with its own logprobs": {"prompt": "Hello", "max_tokens": 4, "logprobs": 2},
    "two texts": {"prompt": ["Hello", "Good"], "max_tokens": 4},
    "response": {"input": "Say hi", "max_output_tokens": 8},
    "message": {"messages": [{"role": "user", "content": "Say hi"}], "system": "Be brief."},
}
PATHS = {"prompt": "completions", "input": "responses", "system": "messages"}


async def body_of(base_url: str, scenario: Mapping[str, Any], stream: bool) -> tuple[int, bytes]:
    """A seeded call's status and body, without what differs between any two calls."""
    path = next((PATHS[field] for field in PATHS if field in scenario), "chat/completions")
    body = {"model": POLICY, "seed": 7, "temperature": 1.0, "max_tokens": 16, "stream": stream}
    if path in ("responses", "messages"):
        # vLLM takes no seed for messages: what does not depend on one is compared.
        body["temperature"] = 0.0
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{base_url}/{path}", json=body | dict(scenario)) as response,
    ):
        body_seen = normalised(await response.read())
    if has_several_choices(scenario):
        # How the choices' chunks are interleaved differs from run to run.
        body_seen = b"\n".join(sorted(body_seen.split(b"\n")))
    return response.status, body_seen


def has_several_choices(scenario: Mapping[str, Any]) -> bool:
    return scenario.get("n", 1) > 1 or isinstance(scenario.get("prompt"), list)


# Ids and times differ between any two calls; everything else must not.
ID = re.compile(rb'"((?:[a-z_]*_)?id)":\s*"[a-z]+[-_][^"]*"')
TIME = re.compile(rb'"(created|created_at|completed_at)":\s*[\d.]+')


def normalised(body: bytes) -> bytes:
    """A reply without what differs between any two."""
    return TIME.sub(rb'"\1":0', ID.sub(rb'"\1":"X"', body))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", SCENARIOS)
async def test_direct_and_proxied_are_the_same_bytes(stack: Stack, name: str, stream: bool) -> None:
    direct = f"http://127.0.0.1:{stack.plan.vllm.port}/v1"
    for _ in range(TRIES):
        wanted = await body_of(direct, SCENARIOS[name], stream)
        seen = await body_of(stack.base_url, SCENARIOS[name], stream)
        if not cut_differently(seen[1], wanted[1]):
            break
    assert seen == wanted


async def test_real_clients_work_unchanged(stack: Stack) -> None:
    # All workers collect this file: one of them runs it.
    from langchain_openai import ChatOpenAI
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=stack.base_url, api_key="unused") as client:
        stream = await client.chat.completions.create(
            model=POLICY,
            messages=[{"role": "user", "content": "Say hi"}],
            max_tokens=8,
            stream=True,
        )
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(pieces)
        assert POLICY in [model.id async for model in await client.models.list()]
    chain = ChatOpenAI(model=POLICY, base_url=stack.base_url, api_key="unused", max_tokens=8)  # type: ignore[call-arg, arg-type]
    assert (await chain.ainvoke("Say hi")).content
