"""The loop on real parts: transparent, token-exact, and not to be stopped by kill -9."""

import json
import os
import re
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI

from pawl.rollout.tasks import Task
from pawl.scenarios.agent import WorkingAgent, response_ids
from pawl.scenarios.places import find_scenario
from pawl.scenarios.tasks import make_tasks
from pawl.stack.stack import Stack
from store.connection.engine import make_engine
from store.read.episodes import episode_ids, read_episodes
from store.read.stats import stored_responses, totals
from store.records import Episode
from store.updates import claims
from store.updates.policies import list_versions
from store.values.tokens import unpack_ids, unpack_logprobs
from tests.e2e.conftest import PATIENCE_S, POLICY
from tests.support.waiting import awaited
from trainer.publishing.server import ModelServer

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(900),
]

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
    wanted = await body_of(direct, SCENARIOS[name], stream)
    assert await body_of(stack.base_url, SCENARIOS[name], stream) == wanted


async def test_real_clients_work_unchanged(stack: Stack) -> None:
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


class Worker:
    """The example agent on a running stack, and a view of the ledger."""

    def __init__(self, stack: Stack, agent: WorkingAgent, questions: Sequence[Task]) -> None:
        self.stack = stack
        self.agent = agent
        self.questions = questions
        self.engine = make_engine(stack.database_url)

    async def ask(self, wave: int) -> None:
        self.agent.ask(self.questions[wave * 4 : wave * 4 + 4])

    async def until(self, check: Callable[[], Awaitable[bool]]) -> None:
        async def look() -> bool | Exception:
            self.stack.check()
            self.agent.collect()
            try:
                return await check()
            except Exception as error:
                # PostgreSQL is being restarted under us: that is the test.
                return error

        found = await awaited(look, lambda found: found is True, within_s=PATIENCE_S)
        assert found is True, f"{check.__name__}: {found!r}"

    def answered(self, count: int) -> Callable[[], Awaitable[bool]]:
        async def answered() -> bool:
            return len(self.agent.results) >= count

        return answered

    def updated(self, count: int) -> Callable[[], Awaitable[bool]]:
        async def updated() -> bool:
            async with self.engine.connect() as connection:
                found = await claims.list_updates(connection, POLICY)
                versions = await list_versions(connection, POLICY)
            done = [update for update in found if update.state == "done"]
            return len(done) >= count and not any(v.state == "written" for v in versions)

        return updated

    async def all_consumed(self) -> bool:
        async with self.engine.connect() as connection:
            counted = await totals(connection)
        return counted.consumed_episodes == len(self.agent.results) and await self.updated(2)()

    async def training(self) -> bool:
        async with self.engine.connect() as connection:
            return await claims.running_update(connection, POLICY) is not None

    async def episodes(self) -> list[Episode]:
        async with self.engine.connect() as connection:
            return await read_episodes(connection, await episode_ids(connection))


async def test_the_loop_survives_kill_9_of_each_process(stack: Stack, tmp_path: Path) -> None:
    scenario = find_scenario(POLICY)
    questions = await make_tasks(scenario, 16, 3, "train", tmp_path)
    agent = WorkingAgent(scenario, stack.url, tmp_path)
    worker = Worker(stack, agent, questions)
    await agent.start(samples=4, concurrency=8)
    try:
        await worker.ask(0)
        await worker.until(worker.answered(3))
        await kill(stack.processes["proxy"].pid)
        await worker.until(worker.answered(16))
        await worker.until(worker.training)
        await kill(stack.processes["trainer"].pid)
        await worker.until(worker.updated(1))

        await worker.ask(1)
        await worker.until(worker.answered(20))
        assert stack.postgres is not None
        await kill(stack.postgres.pid)
        await worker.until(worker.answered(32))
        await worker.until(worker.all_consumed)
    finally:
        await agent.stop()
    await check_the_ledger(worker)
    await check_the_tokens(worker)
    await worker.engine.dispose()


async def kill(pid: int | None) -> None:
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


async def check_the_ledger(worker: Worker) -> None:
    """No call lost, no request failed, no episode trained twice; something went live."""
    assert [r for r in worker.agent.results if r.error] == []
    replies = response_ids(worker.agent.results)
    async with worker.engine.connect() as connection:
        assert await stored_responses(connection, replies) == len(replies) == 32
        counted = await totals(connection)
        versions = await list_versions(connection, POLICY)
        updates = await claims.list_updates(connection, POLICY)
    assert counted.twice_consumed_episodes == 0
    assert counted.trained_unscored_episodes == 0
    assert counted.consumed_episodes == 32
    assert "abandoned" in {update.state for update in updates}
    assert [v.version for v in versions if v.state == "serving"] != [0]


async def check_the_tokens(worker: Worker) -> None:
    """Every trained token is one that vLLM sampled: asked again, it gives the same figures."""
    trainable = [c for e in await worker.episodes() for c in e.calls if c.trainable and e.feedback]
    async with ModelServer(f"http://127.0.0.1:{worker.stack.plan.vllm.port}/v1") as server:
        for call in trainable[:8] + trainable[-8:]:
            version = call.policy_version or 0
            name = f"{POLICY}@{version}" if version else POLICY
            prompt, sampled = (
                unpack_ids(call.tokens.prompt_ids),
                unpack_ids(call.tokens.sampled_ids),
            )
            served = await server.prompt_logprobs(name, [*prompt, *sampled])
            recorded = unpack_logprobs(call.tokens.sampled_logprobs)
            assert served[-len(sampled) :] == pytest.approx(recorded, abs=2e-3)
            usage = json.loads(call.reply or b"{}")["usage"]
            assert usage["completion_tokens"] == len(sampled)
