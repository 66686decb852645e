"""`pawl rollout` as a process, beside a stand-in for the proxy: agents, judges, the terminal."""

import asyncio
import json
import os
import re
import sys
import termios
from collections import Counter
from pathlib import Path

import pytest

from tests.support.rollouts import COMMAND, Runner
from tests.support.servers.fake_proxy import FakeProxy

JUDGE = """
import json, sys

def verdict(given):
    match given["task"]["id"]:
        case "t0": return 0.25
        case "t1": return {"reward": 1, "length": len(given["output"])}
        case "t2": return None
        case "t3": raise ValueError
        case "t4": return "good"
        case "t5": return [{"value": 0.5}, {"metric": "style", "value": 1}]

if __name__ == "__main__":
    print(json.dumps(verdict(json.load(sys.stdin))))
"""


async def test_program_gets_its_task_and_an_address_that_names_it(
    fake: FakeProxy, runner: Runner
) -> None:
    options = ("-n", "2", "-k", "2", "--split", "eval", "--answer", "a", "--policy", "m@2")
    ended = await runner.run(*COMMAND, *options)
    assert (ended.status, ended.errors) == (0, "")
    assert ended.summary["runs"] == ended.summary["planned"] == 12
    assert ended.summary["reward"] == 0.5
    assert Counter(call["task"] for call in fake.calls) == {f"t{n}": 2 for n in range(6)}
    assert {call["split"] for call in fake.calls} == {"eval"}
    assert {asked["model"] for asked in fake.asked} == {"m@2"}
    rewards = fake.rewards()
    assert rewards.keys() == {call["episode"] for call in fake.calls}
    for call in fake.calls:
        assert rewards[call["episode"]] == [float(call["task"] in ("t0", "t1", "t2"))]


async def test_environment_has_the_task_without_its_answer(runner: Runner) -> None:
    runner.write([{"id": "t1", "a": "secret", "do": "environment"}])
    options = ("--answer", "a", "--policy", "m@2")
    assert (await runner.run(*COMMAND, *options)).status == 0
    variables = json.loads(runner.by_task()["t1"].output)
    assert json.loads(variables["ROLLOUT_TASK"]) == {"id": "t1", "do": "environment"}
    assert variables["ROLLOUT_TASK_ID"] == "t1"
    assert "secret" not in str(variables)


@pytest.mark.parametrize("agent", ["command", "agent:answer"])
async def test_hidden_fields_are_shown_to_the_judge_alone(
    fake: FakeProxy, runner: Runner, tmp_path: Path, agent: str
) -> None:
    runner.write([{"id": "t1", "do": "all it knows", "gold": "secret", "tests": ["secret"]}])
    (tmp_path / "judge.py").write_text(
        "import json, sys\n"
        "given = json.load(sys.stdin)\n"
        "assert 'secret' not in given['output']\n"
        "print(len(given['task']['tests']) + len(given['task']['gold']))\n"
    )
    how = COMMAND if agent == "command" else ("--python", agent)
    hidden = ("--hide", "gold", "--hide", "tests")
    judge = ("--judge", f"{sys.executable} judge.py")
    ended = await runner.run(*how, *hidden, *judge)
    assert ended.status == 0, ended.errors
    assert list(fake.rewards().values()) == [[7]]
    assert "all it knows" in runner.by_task()["t1"].output
    # Another set of fields would be another experiment.
    again = await runner.run(*how, "--hide", "gold", *judge)
    assert again.status == 2
    assert "is of a rollout with other hidden: name another file" in again.errors


@pytest.mark.parametrize("agent", ["command", "agent:answer", "agent:alone"])
async def test_failed_run_has_no_reward_and_is_named(
    fake: FakeProxy, runner: Runner, agent: str
) -> None:
    kinds = ["exit", "raise", "hang", "die", "flood", "well"]
    runner.write([{"id": kind, "do": kind} for kind in kinds])
    is_command = agent == "command"
    how = COMMAND if is_command else ("--python", agent)
    ended = await runner.run(*how, "--timeout", "20", "-k", "6", "--answer", "id")
    assert ended.status == 1
    assert {task: run.error for task, run in runner.by_task().items()} == {
        "exit": "exit status 3",
        "raise": "exit status 1" if is_command else "raised ValueError",
        "hang": "time limit",
        "die": "signal SIGKILL" if is_command else "crashed",
        "flood": "too much output",
        "well": None,
    }
    assert "no idea" in runner.by_task()["raise"].errors
    assert runner.by_task()["hang"].detail == "not done within 20 s"
    assert len(fake.rewards()) == 1
    failed = [one for one in fake.statements if one["metric"] == "run_failed"]
    assert len(failed) == 5 == ended.summary["failed"]


async def test_client_made_at_import_calls_nobody(runner: Runner, tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text(
        "import os, agent\nURL = os.environ['OPENAI_BASE_URL']\n"
        "def answer(task):\n    return agent.ask(URL, 'q')\n"
    )
    ended = await runner.run("--python", "early:answer", "-k", "1")
    assert ended.summary["failed"] == 6
    assert "must read OPENAI_BASE_URL" in ended.errors


async def test_judge_states_a_number_or_metrics_or_statements(
    fake: FakeProxy, runner: Runner, tmp_path: Path
) -> None:
    (tmp_path / "judge.py").write_text(JUDGE)
    ended = await runner.run(*COMMAND, "--judge", f"{sys.executable} judge.py", "-k", "3")
    assert ended.status == 1
    assert ended.summary["unjudged"] == 2
    assert ended.summary["errors"] == {"judge failed": 2}
    assert ended.summary["metrics"] == {"reward": 0.5833, "length": 7.0, "style": 1.0}
    tasks = {call["episode"]: call["task"] for call in fake.calls}
    assert {
        (tasks[one["episode"]], one.get("metric"), one["value"]) for one in fake.statements
    } == {
        ("t0", "reward", 0.25),
        ("t1", "reward", 1),
        ("t1", "length", 7),
        ("t5", None, 0.5),
        ("t5", "style", 1),
    }


CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def read_to_its_end(terminal: int) -> str:
    """All that is written to a terminal until no program has it any more."""
    pieces = []
    while True:
        try:
            pieces.append(os.read(terminal, 65536))
        except OSError:  # what Linux says then
            return b"".join(pieces).decode()


async def test_terminal_gets_a_table_and_the_output_the_summary(runner: Runner) -> None:
    runner.write([{"id": "t0", "a": "echo hello"}, {"id": "t1", "a": "x", "do": "exit"}])
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (40, 90))
    process = await runner.start(
        *(*COMMAND, "-n", "2", "-k", "2", "--answer", "a"), terminal=theirs, TERM="xterm-256color"
    )
    os.close(theirs)
    try:
        shown = await asyncio.wait_for(asyncio.to_thread(read_to_its_end, ours), 120)
    finally:
        os.close(ours)
    out, _ = await process.communicate()
    assert process.returncode == 1, shown
    assert json.loads(out)["failed"] == 2
    assert "\x1b[?25l" in shown  # the cursor is hidden, as only a terminal has one
    last = CONTROL.sub("", shown[shown.rindex("under way") :])
    lines = [line.split() for line in last.splitlines()]
    assert ["4/4", "0", "2", "1.000"] in [words[:4] for words in lines]
    assert ["2", "exit", "status", "3"] in lines
