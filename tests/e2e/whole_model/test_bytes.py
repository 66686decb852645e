"""Replies through the proxy are vLLM's own, byte for byte, in all four APIs."""

import re
from typing import Any

import aiohttp
import pytest

from pawl.stack.stack import Stack
from tests.e2e.asking import (
    CHAT_QUESTION,
    CHAT_TOOL,
    QUESTION,
    RESPONSES_QUESTION,
    RESPONSES_TOOL,
    TOOL,
    direct,
)
from tests.e2e.conftest import POLICY
from tests.support.recordings import TRIES, normalised

HI: Any = [{"role": "user", "content": "Say héllo"}]
# A call of a tool and a form are whole, and a stop is come by, in so many tokens; of plain text the
# first few show what the others do.
LONG, SHORT = 24, 8
CALCULATE: Any = {"messages": QUESTION, "tools": [TOOL], "max_tokens": LONG}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CHAT: dict[str, dict[str, Any]] = {
    "plain": {"messages": HI, "max_tokens": 12},
    "tools": {"messages": CHAT_QUESTION, "tools": [CHAT_TOOL], "max_tokens": LONG},
    "own logprobs": {"messages": HI, "logprobs": True, "top_logprobs": 2},
    "own ids": {"messages": HI, "return_token_ids": True},
    "two choices": {"messages": HI, "n": 2},
    "stop": {
        "messages": [{"role": "user", "content": "Count to five"}],
        "stop": ["3", "."],
        "max_tokens": 16,
    },
    "bad request": {"messages": HI, "max_tokens": -1},
    "no messages": {},
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "text": {"prompt": "The capital of France is"},
    "own logprobs": {"prompt": "Hello", "logprobs": 2},
    "two texts": {"prompt": ["Hello", "Good"]},
}
MESSAGES: dict[str, dict[str, Any]] = {
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
    "stop": {
        "messages": [{"role": "user", "content": "Count to ten"}],
        "stop_sequences": ["2", " first"],
        "max_tokens": LONG,
    },
    "a system message amid": {"messages": [*HI, {"role": "system", "content": "Hurry."}]},
    "not thinking": {"messages": HI, "thinking": {"type": "disabled"}},
    "a form": {
        "messages": HI,
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        "max_tokens": LONG,
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
}
RESPONSES: dict[str, dict[str, Any]] = {
    "text": {"input": "Say héllo"},
    "instructions": {
        "input": "Hi",
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
    },
    "a tool": {"input": RESPONSES_QUESTION, "tools": [RESPONSES_TOOL], "max_output_tokens": LONG},
    "log-probabilities": {
        "input": "Hi",
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    },
    "alternatives": {"input": "Hi", "top_logprobs": 50},
    "ids": {"input": "Hi", "enable_response_messages": True},
    "a form": {
        "input": "Hi",
        "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
        "max_output_tokens": LONG,
    },
    "refused": {"input": "Hi", "include": ["nothing"]},
}
# The one difference on purpose: vLLM moves a system message between turns to the front, Pawl adds it
# to the turn before. vLLM is asked with that turn, so the replies are compared all the same.
JOINED: dict[str, Any] = {
    "a system message amid": {
        "messages": [
            {
                "role": "user",
                "content": "Say héllo\n\n<system-reminder>\nHurry.\n</system-reminder>",
            }
        ]
    }
}
SEEDED = {"seed": 7, "temperature": 1.0, "max_tokens": SHORT}
# vLLM takes no seed for messages: what does not depend on one is compared.
APIS: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "chat/completions": (SEEDED, CHAT),
    "completions": (SEEDED, COMPLETIONS),
    "messages": ({"temperature": 0.0, "max_tokens": SHORT}, MESSAGES),
    "responses": ({"temperature": 0.0, "max_output_tokens": SHORT}, RESPONSES),
}
# Ids and times differ between any two calls; everything else must not.
TIME = re.compile(rb'"(created|completed_at)":\s*[\d.]+')


async def answer(url: str, body: dict[str, Any]) -> tuple[int, bytes, str]:
    """A reply's status, its bytes without ids and times, and the version that it names."""
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        seen = TIME.sub(rb'"\1":0', normalised(await response.read()))
        version = response.headers.get("x-pawl-policy", "").removesuffix("@0")
    if body.get("n", 1) > 1 or isinstance(body.get("prompt"), list):
        # How the choices' chunks are interleaved differs from run to run.
        seen = b"\n".join(sorted(seen.split(b"\n")))
    return response.status, seen, version


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("path", "name"), [(path, name) for path, (_, fields) in APIS.items() for name in fields]
)
async def test_direct_and_proxied_replies_are_the_same_bytes(
    stack: Stack, path: str, name: str, stream: bool
) -> None:
    defaults, scenarios = APIS[path]
    body = {"model": POLICY, "stream": stream} | defaults | scenarios[name]
    for _ in range(TRIES):
        status, seen, version = await answer(f"{stack.base_url}/{path}", body)
        wanted_status, wanted, _ = await answer(
            f"{direct(stack)}/{path}", body | JOINED.get(name, {}) | {"model": version}
        )
        named = b'"model":"%b"'
        wanted = wanted.replace(named % version.encode(), named % POLICY.encode())
        # What the server has cached of a prompt changes log-probabilities in the sixth digit.
        if (status, seen) == (wanted_status, wanted):
            break
    assert (status, seen) == (wanted_status, wanted)


async def test_models_are_listed_under_the_name_that_clients_use(stack: Stack) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{stack.base_url}/models") as response,
    ):
        assert POLICY in [model["id"] for model in (await response.json())["data"]]
