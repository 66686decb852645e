"""Replies through the proxy are vLLM's own, byte for byte, where the model must make sense.

What any model shows is in `tests/e2e/any_model/test_bytes.py`.
"""

from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from pawl.stack.stack import Stack
from tests.e2e.asking import (
    CHAT_QUESTION,
    CHAT_TOOL,
    QUESTION,
    RESPONSES_QUESTION,
    RESPONSES_TOOL,
    TOOL,
)
from tests.e2e.comparing import Reply, Scenarios, assert_same_bytes, cases_of, first_replies
from tests.e2e.conftest import POLICY

# A call of a tool and a form are whole, and a stop is come by, in so many tokens.
LONG = 24
CALCULATE: Any = {"messages": QUESTION, "tools": [TOOL], "max_tokens": LONG}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SCENARIOS: Scenarios = {
    "chat/completions": {
        "tools": {"messages": CHAT_QUESTION, "tools": [CHAT_TOOL], "max_tokens": LONG},
        "stop": {
            "messages": [{"role": "user", "content": "Count to five"}],
            "stop": ["3", "."],
            "max_tokens": 16,
        },
    },
    "messages": {
        "tools": CALCULATE,
        "any tool": CALCULATE | {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        "no tool": CALCULATE | {"tool_choice": {"type": "none"}},
        "stop": {
            "messages": [{"role": "user", "content": "Count to ten"}],
            "stop_sequences": ["2", " first"],
            "max_tokens": LONG,
        },
        "a form": {
            "messages": [{"role": "user", "content": "Say héllo"}],
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
            "max_tokens": LONG,
        },
    },
    "responses": {
        "a tool": {
            "input": RESPONSES_QUESTION,
            "tools": [RESPONSES_TOOL],
            "max_output_tokens": LONG,
        },
        "a form": {
            "input": "Hi",
            "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
            "max_output_tokens": LONG,
        },
    },
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def replies(stack: Stack) -> dict[str, tuple[Reply, Reply]]:
    return await first_replies(stack, SCENARIOS)


@pytest.mark.parametrize("case", cases_of(SCENARIOS))
async def test_direct_and_proxied_replies_are_the_same_bytes(
    stack: Stack, replies: dict[str, tuple[Reply, Reply]], case: str
) -> None:
    path, body = cases_of(SCENARIOS)[case]
    await assert_same_bytes(stack, path, body, first=replies[case])


async def test_list_of_models_has_the_policy_name_that_clients_use(stack: Stack) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{stack.base_url}/models") as response,
    ):
        assert POLICY in [model["id"] for model in (await response.json())["data"]]
