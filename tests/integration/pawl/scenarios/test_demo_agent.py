"""The demo's agent on a stand-in for the proxy, with the example's own judge."""

import asyncio
import json
from pathlib import Path

import pytest

from pawl.rollout.tasks import Task
from pawl.scenarios.agent import WorkingAgent, run_held_out
from pawl.scenarios.scenario import ScenarioFailed, find_scenario
from tests.support.servers.fake_proxy import FakeProxy
from tests.support.waiting import until

QUESTIONS = [
    Task(name=f"q{n}", fields={"id": f"q{n}", "question": f"What is {n}?", "answer": n})
    for n in range(4)
]
DEMO = find_scenario("calculator").model_copy(update={"model": "m", "held_out_samples": 1})


async def test_demo_agent_answers_waves_of_questions_and_returns_each_result_once(
    fake: FakeProxy, tmp_path: Path
) -> None:
    agent = WorkingAgent(DEMO, fake.url, tmp_path)
    await agent.start(samples=2, concurrency=4)
    try:
        agent.ask(QUESTIONS[:2])
        await agent.finish()
        assert [result.task for result in agent.collect()].count("q0") == 2
        agent.ask(QUESTIONS[2:])
        await agent.finish()
        assert len(agent.collect()) == 4
        assert agent.collect() == []
    finally:
        await agent.stop()
    assert {result.sample for result in agent.results} == {0, 1}
    assert all(result.error is None for result in agent.results)
    assert len({json.loads(result.output)["response_id"] for result in agent.results}) == 8
    assert {call["task"] for call in fake.calls} == {"q0", "q1", "q2", "q3"}
    assert {asked["model"] for asked in fake.asked} == {"m"}
    assert {one["metric"] for one in fake.statements} == {"reward", "success", "well_formed"}
    assert set(fake.rewards()) == {call["episode"] for call in fake.calls}


async def test_demo_agent_sends_its_environments_temperature_and_no_top_p_or_top_k(
    fake: FakeProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENT_TEMPERATURE", "0.8")
    await run_held_out(DEMO, fake.url, QUESTIONS[:1], tmp_path, name="before")
    [asked] = fake.asked
    assert asked["temperature"] == 0.8
    assert not {"top_p", "top_k"} & asked.keys()


async def test_evaluation_is_marked_as_split_eval_and_writes_its_results(
    fake: FakeProxy, tmp_path: Path
) -> None:
    exam = await run_held_out(DEMO, fake.url, QUESTIONS, tmp_path, name="before")
    assert (exam.score, len(exam.results), exam.failed) == (0.0, 4, 0)
    assert {call["split"] for call in fake.calls} == {"eval"}
    journal = (tmp_path / "before-1.rollout.jsonl").read_text().splitlines()
    ended = [line for line in map(json.loads, journal) if line["line"] == "ended"]
    ids = [json.loads(line["output"])["response_id"] for line in ended]
    assert len(set(ids)) == 4


async def test_an_evaluation_has_the_score_of_each_family_of_tasks(
    fake: FakeProxy, tmp_path: Path
) -> None:
    tasks = [
        Task(name=f"{'ab'[number % 2]}/{number}", fields=task.fields)
        for number, task in enumerate(QUESTIONS)
    ]
    exam = await run_held_out(DEMO, fake.url, tasks, tmp_path, name="before")
    assert exam.families == {"a": 0.0, "b": 0.0}


async def test_a_judge_that_fails_ends_the_demo(fake: FakeProxy, tmp_path: Path) -> None:
    odd = Task(name="q0", fields=QUESTIONS[0].fields | {"answer": "none"})
    agent = WorkingAgent(DEMO, fake.url, tmp_path)
    await agent.start(samples=1, concurrency=2)
    try:
        agent.ask([odd, *QUESTIONS[1:]])
        await agent.finish()
        with pytest.raises(ScenarioFailed, match="the judge failed: raised ValueError"):
            agent.collect()
    finally:
        await agent.stop()


async def test_stopping_the_agent_abandons_its_open_questions(
    fake: FakeProxy, tmp_path: Path
) -> None:
    fake.down = True
    agent = WorkingAgent(DEMO, fake.url, tmp_path)
    await agent.start(samples=1, concurrency=2)
    agent.ask(QUESTIONS)
    await until(lambda: any(tmp_path.glob("*.rollout.jsonl")))
    fake.down = False
    await asyncio.wait_for(agent.stop(), 30)
    assert fake.rewards() == {}
