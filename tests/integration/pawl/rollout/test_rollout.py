"""`pawl rollout` as a process, beside a stand-in for the proxy: agents, judges, versions."""

import json
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.rollouts import Runner
from tests.support.servers.fake_proxy import FakeProxy, fake_proxy

COMMAND = ("--command", f"{sys.executable} agent.py")
TASKS = [{"id": f"t{number}", "q": f"q{number}", "a": f"echo q{number % 3}"} for number in range(6)]
JUDGE = """
import json, sys

def verdict(told):
    match told["task"]["id"]:
        case "t0": return 0.25
        case "t1": return {"reward": 1, "length": len(told["output"])}
        case "t2": return None
        case "t3": raise ValueError
        case "t4": return "good"
        case "t5": return [{"value": 0.5}, {"metric": "style", "value": 1}]

if __name__ == "__main__":
    print(json.dumps(verdict(json.load(sys.stdin))))
"""


@pytest.fixture
async def fake() -> AsyncIterator[FakeProxy]:
    async with fake_proxy() as server:
        yield server


@pytest.fixture
def runner(fake: FakeProxy, tmp_path: Path) -> Runner:
    return Runner(tmp_path, fake.url, TASKS)


async def test_a_program_gets_its_task_and_an_address_that_names_it(
    fake: FakeProxy, runner: Runner
) -> None:
    told = await runner.run(*COMMAND, "-n", "2", "-k", "2", "--split", "eval", "--answer", "a")
    assert (told.status, told.errors) == (0, "")
    assert told.summary["complete"]
    assert told.summary["reward"] == 0.5
    assert Counter(call["task"] for call in fake.calls) == {f"t{n}": 2 for n in range(6)}
    assert {call["split"] for call in fake.calls} == {"eval"}
    rewards = fake.rewards()
    assert rewards.keys() == {call["episode"] for call in fake.calls}
    for call in fake.calls:
        assert rewards[call["episode"]] == [float(call["task"] in ("t0", "t1", "t2"))]


async def test_the_environment_tells_the_task_without_its_answer(runner: Runner) -> None:
    runner.write([{"id": "t1", "a": "secret", "do": "environment"}])
    options = ("--answer", "a", "--policy", "m@2")
    assert (await runner.run(*COMMAND, *options)).status == 0
    told = json.loads(runner.by_task()["t1"].output)
    assert json.loads(told["ROLLOUT_TASK"]) == {"id": "t1", "do": "environment"}
    assert told["ROLLOUT_TASK_ID"] == "t1"
    assert "secret" not in str(told)


@pytest.mark.parametrize("agent", ["command", "agent:answer"])
async def test_what_is_hidden_from_the_agent_is_shown_to_the_judge(
    fake: FakeProxy, runner: Runner, tmp_path: Path, agent: str
) -> None:
    runner.write([{"id": "t1", "do": "all it knows", "gold": "secret", "tests": ["secret"]}])
    (tmp_path / "judge.py").write_text(
        "def verdict(told):\n"
        "    assert 'secret' not in told['output']\n"
        "    return len(told['task']['tests']) + len(told['task']['gold'])\n"
    )
    how = COMMAND if agent == "command" else ("--python", agent)
    hidden = ("--hide", "gold", "--hide", "tests")
    told = await runner.run(*how, *hidden, "--judge-python", "judge:verdict")
    assert told.status == 0, told.errors
    assert list(fake.rewards().values()) == [[7]]
    assert "all it knows" in runner.by_task()["t1"].output
    # Another set of fields would be another experiment.
    again = await runner.run(*how, "--hide", "gold", "--judge-python", "judge:verdict")
    assert again.status == 2
    assert "is of a rollout with another --hide: name another file" in again.errors


@pytest.mark.parametrize("agent", ["command", "agent:answer", "agent:alone"])
async def test_a_run_that_fails_has_no_reward_and_says_why(
    fake: FakeProxy, runner: Runner, agent: str
) -> None:
    kinds = ["exit", "raise", "hang", "die", "flood", "no json", "well"]
    runner.write([{"id": kind, "do": kind} for kind in kinds if kind != "no json" or ":" in agent])
    how = COMMAND if agent == "command" else ("--python", agent)
    told = await runner.run(*how, "--timeout", "20", "-k", "7", "--answer", "id")
    assert told.status == 1
    found = {task: finished.error for task, finished in runner.by_task().items()}
    by_python = ":" in agent
    assert found == {
        "exit": "exit status 3",
        "raise": "raised ValueError" if by_python else "exit status 1",
        "hang": "time limit",
        "die": "signal SIGKILL",
        "flood": "too much output",
        "well": None,
    } | ({"no json": "raised TypeError"} if by_python else {})
    assert "no idea" in runner.by_task()["raise"].errors
    assert runner.by_task()["hang"].detail == "not done within 20 s"
    assert len(fake.rewards()) == 1
    failed = [one for one in fake.statements if one["metric"] == "run_failed"]
    assert len(failed) == len(found) - 1 == told.summary["failed"]


async def test_a_python_agent_is_imported_once_a_worker(runner: Runner, tmp_path: Path) -> None:
    started = tmp_path / "started"
    told = await runner.run(
        *("--python", "agent:answer", "-n", "4", "-k", "2", "--answer", "a"), STARTED=str(started)
    )
    assert told.status == 0
    assert told.summary["runs"] == 24
    assert len(started.read_text().splitlines()) == 2


async def test_a_function_that_takes_the_address_shares_its_worker(
    fake: FakeProxy, runner: Runner, tmp_path: Path
) -> None:
    started = tmp_path / "started"
    told = await runner.run(
        *("--python", "agent:together", "-n", "4", "-k", "8"), STARTED=str(started)
    )
    assert told.status == 0
    assert len(started.read_text().splitlines()) == 1
    assert Counter(call["task"] for call in fake.calls) == {f"t{n}": 4 for n in range(6)}
    assert len({call["episode"] for call in fake.calls}) == 24


async def test_one_that_blocks_is_ended_with_its_worker(runner: Runner) -> None:
    """What comes after it runs in another one."""
    runner.write([{"id": "block", "do": "block"}, {"id": "wait", "do": "wait"}, *TASKS])
    told = await runner.run("--python", "agent:together", "--timeout", "3", "-k", "1")
    found = {task: finished.error for task, finished in runner.by_task().items()}
    expected = dict.fromkeys(task["id"] for task in TASKS) | dict.fromkeys(
        ("block", "wait"), "time limit"
    )
    assert found == expected
    assert told.summary["runs"] == 8


@pytest.mark.parametrize(("do", "said"), [("leave", "exit status 3"), ("die", "signal SIGKILL")])
async def test_a_crash_in_a_shared_worker_costs_the_run_that_caused_it(
    fake: FakeProxy, runner: Runner, do: str, said: str
) -> None:
    """Whose fault it was is seen when all that ran there are tried again, each alone."""
    runner.write([*(task | {"seconds": 2} for task in TASKS), {"id": "fatal", "do": do, "a": ""}])
    told = await runner.run("--python", "agent:together", "-k", "7", "--answer", "a")
    found = {task: finished.error for task, finished in runner.by_task().items()}
    assert found == dict.fromkeys(task["id"] for task in TASKS) | {"fatal": said}
    assert (told.summary["failed"], told.summary["abandoned"]) == (1, 7)
    assert len(fake.rewards()) == 6
    abandoned = {one["episode"] for one in fake.statements if one["metric"] == "run_abandoned"}
    assert len(abandoned) == 7
    assert not abandoned & fake.rewards().keys()


async def test_whatever_a_function_raises_is_its_failure(runner: Runner) -> None:
    raised = {
        "cancel": "CancelledError",
        "interrupt": "KeyboardInterrupt",
        "group": "BaseExceptionGroup",
        "unspeakable": "Unspeakable",
    }
    runner.write([*({"id": kind, "do": kind} for kind in raised), {"id": "well"}])
    told = await runner.run("--python", "agent:together", "--timeout", "3")
    found = {task: finished.error for task, finished in runner.by_task().items()}
    expected = {kind: f"raised {name}" for kind, name in raised.items()}
    assert found == {"well": None, **expected}
    assert told.summary["abandoned"] == 0


async def test_a_plain_function_may_have_an_event_loop_of_its_own(runner: Runner) -> None:
    runner.write([{"id": "t1", "do": "loop"}])
    assert (await runner.run("--python", "agent:answer")).status == 0
    assert runner.by_task()["t1"].output == "echo hello"


async def test_a_client_made_at_import_calls_nobody(runner: Runner, tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text(
        "import os, agent\nURL = os.environ['OPENAI_BASE_URL']\n"
        "def answer(task):\n    return agent.ask(URL, 'q')\n"
    )
    told = await runner.run("--python", "early:answer", "-k", "1")
    assert told.summary["failed"] == 6
    assert "must read OPENAI_BASE_URL" in told.errors


@pytest.mark.parametrize(
    "judge",
    [("--judge", f"{sys.executable} judge.py"), ("--judge-python", "judge:verdict")],
    ids=["program", "warm"],
)
async def test_a_judge_says_a_number_or_metrics_or_statements(
    fake: FakeProxy, runner: Runner, tmp_path: Path, judge: tuple[str, str]
) -> None:
    (tmp_path / "judge.py").write_text(JUDGE)
    told = await runner.run(*COMMAND, *judge, "-k", "3")
    assert told.status == 1
    assert told.summary["unjudged"] == 2
    assert told.summary["errors"] == {"judge failed": 2}
    assert told.summary["metrics"] == {"reward": 0.5833, "length": 7.0, "style": 1.0}
    tasks = {call["episode"]: call["task"] for call in fake.calls}
    said = {(tasks[one["episode"]], one.get("metric"), one["value"]) for one in fake.statements}
    assert said == {
        ("t0", "reward", 0.25),
        ("t1", "reward", 1),
        ("t1", "length", 7),
        ("t5", None, 0.5),
        ("t5", "style", 1),
    }


async def test_every_version_is_run_and_told_apart(fake: FakeProxy, runner: Runner) -> None:
    options = ("--policy", "m", "--every-version", "--summary", "out/summary.json")
    told = await runner.run("--python", "agent:answer", *options, "--answer", "a", "-k", "4")
    assert told.status == 0
    assert Counter(asked["model"] for asked in fake.asked) == {"m@0": 6, "m@1": 6, "m@2": 6}
    assert {call["split"] for call in fake.calls} == {"eval"}
    written = json.loads((runner.folder / "out/summary.json").read_text())
    assert written == told.summary
    assert {name: one["reward"] for name, one in written["policies"].items()} == dict.fromkeys(
        ("m@0", "m@1", "m@2"), 0.5
    )
