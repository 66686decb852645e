"""The demo's agent: warm, on a stand-in for the proxy, with the example's own judge."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pawl.demo.agent import WorkingAgent, examine
from pawl.demo.errors import DemoFailed
from tests.support.servers.fake_proxy import FakeProxy, fake_proxy
from tests.support.waiting import until

QUESTIONS = [{"id": f"q{n}", "question": f"What is {n}?", "answer": n} for n in range(4)]


@pytest.fixture
async def fake() -> AsyncIterator[FakeProxy]:
    async with fake_proxy() as server:
        yield server


@pytest.fixture
def questions(tmp_path: Path) -> tuple[Path, Path]:
    """The questions without and with their answers."""
    plain, answered = tmp_path / "plain.jsonl", tmp_path / "answered.jsonl"
    answered.write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
    shown = [{"id": one["id"], "question": one["question"]} for one in QUESTIONS]
    plain.write_text("".join(json.dumps(one) + "\n" for one in shown))
    return plain, answered


async def test_waves_of_questions_come_back_as_results(
    fake: FakeProxy, questions: tuple[Path, Path], tmp_path: Path
) -> None:
    plain, answered = questions
    lines = plain.read_text().splitlines()
    agent = WorkingAgent(fake.url, "m", answered, tmp_path)
    await agent.start(samples=2, concurrency=4)
    try:
        agent.ask(lines[:2])
        await agent.finish()
        assert [result["id"] for result in agent.collect()].count("q0") == 2
        agent.ask(lines[2:])
        await agent.finish()
        assert len(agent.collect()) == 4
        assert agent.collect() == []
    finally:
        await agent.stop()
    assert {result["sample"] for result in agent.results} == {0, 1}
    assert all(result["error"] is None and result["response_id"] for result in agent.results)
    assert {call["task"] for call in fake.calls} == {"q0", "q1", "q2", "q3"}
    assert {asked["model"] for asked in fake.asked} == {"m"}
    assert {one["metric"] for one in fake.statements} == {"reward", "success"}
    assert set(fake.rewards()) == {call["episode"] for call in fake.calls}


async def test_an_evaluation_says_so_and_writes_its_results(
    fake: FakeProxy, questions: tuple[Path, Path], tmp_path: Path
) -> None:
    out = tmp_path / "before.jsonl"
    summary = await examine(fake.url, "m", *questions, out, samples=1)
    assert summary == {"success": 0.0, "results": 4, "failed_calls": 0}
    assert {call["split"] for call in fake.calls} == {"eval"}
    ids = [json.loads(line)["response_id"] for line in out.read_text().splitlines()]
    assert len(set(ids)) == 4


async def test_a_judge_that_fails_ends_the_demo(
    fake: FakeProxy, questions: tuple[Path, Path], tmp_path: Path
) -> None:
    plain, answered = questions
    answered.write_text(answered.read_text().replace('"answer": 0', '"answer": "none"'))
    agent = WorkingAgent(fake.url, "m", answered, tmp_path)
    await agent.start(samples=1, concurrency=2)
    try:
        agent.ask(plain.read_text().splitlines())
        await agent.finish()
        with pytest.raises(DemoFailed, match="the judge failed: raised ValueError"):
            agent.collect()
    finally:
        await agent.stop()


async def test_stopping_gives_up_what_is_under_way(
    fake: FakeProxy, questions: tuple[Path, Path], tmp_path: Path
) -> None:
    plain, answered = questions
    fake.down = True
    agent = WorkingAgent(fake.url, "m", answered, tmp_path)
    await agent.start(samples=1, concurrency=2)
    agent.ask(plain.read_text().splitlines())
    await until(lambda: any(tmp_path.glob("*.rollout.jsonl")))
    fake.down = False
    await asyncio.wait_for(agent.stop(), 30)
    assert fake.rewards() == {}
