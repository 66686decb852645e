"""What greedy clients explore on a real vLLM can be trained on, with the probabilities it had."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from benchmarks.stack import free_port
from pawl.stack.process import Process
from pawl.stack.stack import Stack
from tests.e2e.conftest import POLICY, ShowNats
from tests.e2e.replaying import post, recorded_calls, trainers_differences
from tests.support.waiting import eventually
from trainer.learners.learner import Learner

FILE = f"""
[[policy]]
name = "curious"
base = "{POLICY}"
[policy.explore]
share = 1.0
temperature = 0.8
drop_strict = true

[[policy]]
name = "cold"
base = "{POLICY}"
"""
QUESTION = "Tell me about the capital of France, the river there and the food."
# A raw completion of a whole question may end at once, each time alike.
OPENING = "Once upon a time in a town by the sea there was a"
MESSAGES = [{"role": "user", "content": QUESTION}]
SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}}}
LOOK_UP = {"name": "look_up", "description": "Looks a word up.", "parameters": SCHEMA}
STRICT = [{"type": "function", "function": LOOK_UP | {"strict": True}}]
CARD = {"top_p": 0.95, "top_k": 20}
# The path and the fields of each call; all are greedy, most under a seed.
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat/completions", {"messages": MESSAGES, "seed": 5, **CARD}),
    "chat, streamed": ("chat/completions", {"messages": MESSAGES, "stream": True, "seed": 5}),
    "chat, strict": ("chat/completions", {"messages": MESSAGES, "tools": STRICT, "seed": 5}),
    "completions": ("completions", {"prompt": OPENING, "seed": 5}),
    "messages": ("messages", {"messages": MESSAGES, "top_k": 20}),
    "responses": ("responses", {"input": QUESTION, "tools": [{"type": "function", **LOOK_UP}]}),
}
TIMES = 3
LIMITS = {"responses": "max_output_tokens"}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def exploring(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """Another proxy before the stack's vLLM and database, which reads a file of policies."""
    folder: Path = tmp_path_factory.mktemp("exploring")
    (folder / "policies.toml").write_text(FILE)
    ours = stack.processes["proxy"]
    listen, admin = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    environment = ours._environment | {
        "PAWL_LISTEN": listen,
        "PAWL_ADMIN_LISTEN": admin,
        "PAWL_SPOOL_DIR": str(folder / "spool"),
        "PAWL_POLICIES": str(folder / "policies.toml"),
        # With a parser that it does not know, strict tools may be held to a grammar.
        "PAWL_TOOL_PARSER": "",
    }
    proxy = Process("exploring", ours._command, environment, folder)
    await proxy.start()

    async def ready() -> bool:
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"http://{admin}/readyz") as reply,
            ):
                return reply.status == 200
        except aiohttp.ClientError:
            return False

    await eventually(ready)
    yield f"http://{listen}/v1"
    await proxy.stop()


async def ask(url: str, model: str, name: str, episode: str) -> str | None:
    """The reply's header that names what was explored."""
    path, asked = ASKED[name]
    body = {"model": model, "temperature": 0, LIMITS.get(path, "max_tokens"): 24} | asked
    return (await post(url, path, body, episode)).get("x-pawl-explored")


async def test_greedy_calls_are_explored_and_replayed_to_a_thousandth_of_a_nat(
    stack: Stack, exploring: str, learner: Learner, show_nats: ShowNats
) -> None:
    wanted = {f"explored, {name}-{number}": name for name in ASKED for number in range(TIMES)}
    headers = await asyncio.gather(
        *(ask(exploring, "curious", name, episode) for episode, name in wanted.items())
    )
    assert dict(zip(wanted.values(), headers, strict=True)) == {
        "chat": "temperature=0.8, seed",
        "chat, streamed": "temperature=0.8, seed",
        "chat, strict": "temperature=0.8, seed, strict",
        "completions": "temperature=0.8, seed",
        "messages": "temperature=0.8",
        "responses": "temperature=0.8",
    }
    calls, _ = await recorded_calls(stack, wanted)
    recorded = [call for own in calls.values() for call in own]
    assert {(call.policy, call.policy_version, call.reason) for call in recorded} == {
        ("curious", 0, None)
    }
    assert {call.sampling["temperature"] for call in recorded} == {0.8}
    assert {json.loads(call.request or b"")["temperature"] for call in recorded} == {0}
    # They do explore: what one prompt was answered with differs.
    for name, own in calls.items():
        assert len({call.tokens.sampled_ids for call in own}) > 1, name
    means = trainers_differences(learner, calls, {0: None})
    show_nats(means)
    assert max(means.values()) <= 1e-3, means


async def test_without_exploration_the_same_calls_are_greedy(stack: Stack, exploring: str) -> None:
    wanted = {f"greedy, {name}": name for name in ASKED}
    headers = await asyncio.gather(
        *(ask(exploring, "cold", name, episode) for episode, name in wanted.items())
    )
    assert set(headers) == {None}
    calls, _ = await recorded_calls(stack, wanted)
    assert {call.reason for own in calls.values() for call in own} == {"greedy"}
