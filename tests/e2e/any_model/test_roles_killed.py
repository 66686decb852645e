"""The loop on real parts is not to be stopped by kill -9, and trains on the tokens sampled.

By its name it comes after the tests that any version shows: a model with an adapter takes twice as
long.
"""

import json
import os
import shutil
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
from sqlalchemy import text

from pawl.rollout.tasks import Task
from pawl.scenarios.agent import WorkingAgent
from pawl.scenarios.scenario import EXAMPLES, Scenario, find_scenario, make_tasks
from pawl.stack.stack import Stack
from store import claims
from store.database import make_engine
from store.read.episodes import read_episodes
from store.records import Episode
from store.selecting import select_episodes
from store.values.packing import unpack_ids, unpack_logprobs
from store.version_queries import list_versions
from tests.e2e.conftest import PATIENCE_S, POLICY
from tests.support.ledger.totals import totals
from tests.support.waiting import awaited
from trainer.publishing.model_server import ModelServer

# Episodes of tests that share the stack name no task; those that failed are consumed too.
OWN_CONSUMED = text(
    "SELECT count(*) FROM consumptions JOIN episodes ON episodes.id = episode_id WHERE task_named"
)
# The model says nothing sensible: every second answer to a task is right.
JUDGE = """
from collections import Counter

TRIED = Counter()

def verdict(run):
    TRIED[run["task"]["id"]] += 1
    return [{"metric": "reward", "value": TRIED[run["task"]["id"]] % 2}]
"""
TASKS, TRIES = 2, 4
RUNS = 2 * TASKS * TRIES


@pytest.fixture
def scenario(tmp_path: Path) -> Scenario:
    """Copy the calculator's agent and tasks, with a judge that any model pleases."""
    folder = tmp_path / "examples" / POLICY
    shutil.copytree(EXAMPLES / POLICY, folder)
    (folder / "judge.py").write_text(JUDGE)
    return find_scenario(POLICY, folder.parent)


class Worker:
    """The example agent on a running stack, and a view of the ledger."""

    def __init__(self, stack: Stack, agent: WorkingAgent, questions: Sequence[Task]) -> None:
        self.stack = stack
        self.agent = agent
        self.questions = questions
        self.engine = make_engine(stack.database_url)

    async def ask(self, wave: int) -> None:
        self.agent.ask(self.questions[wave * TASKS : (wave + 1) * TASKS])

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
            consumed = await connection.scalar(OWN_CONSUMED)
        return consumed == len(self.agent.results) and await self.updated(2)()

    async def training(self) -> bool:
        async with self.engine.connect() as connection:
            return await claims.running_update(connection, POLICY) is not None

    async def episodes(self) -> list[Episode]:
        async with self.engine.connect() as connection:
            return await read_episodes(connection, await select_episodes(connection))


async def test_serving_and_training_survive_kill_9_of_proxy_trainer_and_postgres(
    stack: Stack, scenario: Scenario, tmp_path: Path
) -> None:
    questions = await make_tasks(scenario, 2 * TASKS, 3, "train", tmp_path)
    agent = WorkingAgent(scenario, stack.url, tmp_path)
    worker = Worker(stack, agent, questions)
    await agent.start(samples=TRIES, concurrency=8)
    try:
        await worker.ask(0)
        await worker.until(worker.answered(3))
        await kill(stack.processes["proxy"].pid)
        await worker.until(worker.answered(RUNS // 2))
        await worker.until(worker.training)
        await kill(stack.processes["trainer"].pid)
        await worker.until(worker.updated(1))

        await worker.ask(1)
        await worker.until(worker.answered(RUNS // 2 + 2))
        assert stack.postgres is not None
        await kill(stack.postgres.pid)
        await worker.until(worker.answered(RUNS))
        await worker.until(worker.all_consumed)
        await check_the_ledger(worker)
        await check_the_tokens(worker)
    finally:
        await agent.stop()
        await worker.engine.dispose()


async def kill(pid: int | None) -> None:
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


async def check_the_ledger(worker: Worker) -> None:
    """No call lost, no request failed, no episode trained twice; something went live."""
    assert [r for r in worker.agent.results if r.error] == []
    replies = [json.loads(result.output)["response_id"] for result in worker.agent.results]
    async with worker.engine.connect() as connection:
        stored = text(
            "SELECT count(DISTINCT response_id) FROM transitions WHERE response_id = ANY(:r)"
        )
        assert await connection.scalar(stored, {"r": replies}) == len(replies) == RUNS
        counted, consumed = await totals(connection), await connection.scalar(OWN_CONSUMED)
        versions = await list_versions(connection, POLICY)
        updates = await claims.list_updates(connection, POLICY)
    assert counted.twice_consumed_episodes == 0
    assert counted.trained_unscored_episodes == 0
    assert consumed == RUNS
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
