"""`pawl rollout` as a process, beside a stand-in for the proxy: agents, judges, the terminal.

Stopped, killed, or left alone by the proxy or the model server, it goes on.
"""

import asyncio
import json
import os
import re
import signal
import sys
import termios
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.rollouts import COMMAND, TASKS, Outcome, Runner, ended
from tests.support.servers.fake_proxy import FakeProxy
from tests.support.waiting import until

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


async def test_agent_program_gets_its_task_and_a_base_url_that_names_the_task(
    fake: FakeProxy, runner: Runner
) -> None:
    options = ("-n", "2", "-k", "2", "--split", "eval", "--answer", "a", "--policy", "m@2")
    outcome = await runner.run(*COMMAND, *options)
    assert (outcome.status, outcome.errors) == (0, "")
    assert outcome.summary["runs"] == outcome.summary["planned"] == 12
    assert outcome.summary["reward"] == 0.5
    assert Counter(call["task"] for call in fake.calls) == {f"t{n}": 2 for n in range(6)}
    assert {call["split"] for call in fake.calls} == {"eval"}
    assert {asked["model"] for asked in fake.asked} == {"m@2"}
    rewards = fake.rewards()
    assert rewards.keys() == {call["episode"] for call in fake.calls}
    for call in fake.calls:
        assert rewards[call["episode"]] == [float(call["task"] in ("t0", "t1", "t2"))]


async def test_agents_environment_has_the_task_without_its_answer(runner: Runner) -> None:
    runner.write([{"id": "t1", "a": "secret", "do": "environment"}])
    options = ("--answer", "a", "--policy", "m@2")
    assert (await runner.run(*COMMAND, *options)).status == 0
    variables = json.loads(runner.by_task()["t1"].output)
    assert json.loads(variables["ROLLOUT_TASK"]) == {"id": "t1", "do": "environment"}
    assert variables["ROLLOUT_TASK_ID"] == "t1"
    assert "secret" not in str(variables)


@pytest.mark.parametrize("agent", ["command", "agent:answer"])
async def test_hidden_task_fields_are_shown_to_the_judge_alone(
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
    outcome = await runner.run(*how, *hidden, *judge)
    assert outcome.status == 0, outcome.errors
    assert list(fake.rewards().values()) == [[7]]
    assert "all it knows" in runner.by_task()["t1"].output
    # Another set of fields would be another experiment.
    again = await runner.run(*how, "--hide", "gold", *judge)
    assert again.status == 2
    assert "belongs to a rollout with other hidden: name another file" in again.errors


@pytest.mark.parametrize("agent", ["command", "agent:alone"])
async def test_failed_run_has_no_reward_and_is_reported_with_its_error(
    fake: FakeProxy, runner: Runner, agent: str
) -> None:
    kinds = ["exit", "raise", "hang", "die", "flood", "well"]
    runner.write([{"id": kind, "do": kind} for kind in kinds])
    is_command = agent == "command"
    how = COMMAND if is_command else ("--python", agent)
    outcome = await runner.run(*how, "--timeout", "20", "-k", "6", "--answer", "id")
    assert outcome.status == 1
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
    assert len(failed) == 5 == outcome.summary["failed"]


async def test_base_url_read_at_import_fails_all_runs_with_advice(
    runner: Runner, tmp_path: Path
) -> None:
    (tmp_path / "early.py").write_text(
        "import os, agent\nURL = os.environ['OPENAI_BASE_URL']\n"
        "def answer(task):\n    return agent.ask(URL, 'q')\n"
    )
    outcome = await runner.run("--python", "early:answer", "-k", "1")
    assert outcome.summary["failed"] == 6
    assert "must read OPENAI_BASE_URL" in outcome.errors


async def test_judge_program_may_answer_with_a_number_metrics_or_statements(
    fake: FakeProxy, runner: Runner, tmp_path: Path
) -> None:
    (tmp_path / "judge.py").write_text(JUDGE)
    outcome = await runner.run(*COMMAND, "--judge", f"{sys.executable} judge.py", "-k", "3")
    assert outcome.status == 1
    assert outcome.summary["unjudged"] == 2
    assert outcome.summary["errors"] == {"judge failed": 2}
    assert outcome.summary["metrics"] == {"reward": 0.5833, "length": 7.0, "style": 1.0}
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


async def test_terminal_shows_a_table_and_stdout_gets_the_summary(runner: Runner) -> None:
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


async def test_option_again_repeats_only_failed_runs(fake: FakeProxy, runner: Runner) -> None:
    runner.write([{"id": "t0"}, {"id": "t1", "do": "exit"}])
    assert (await runner.run(*COMMAND)).status == 1
    calls = len(fake.calls)
    assert (await runner.run(*COMMAND)).status == 1
    assert len(fake.calls) == calls
    assert (await runner.run(*COMMAND, "--again")).status == 1
    assert [call["task"] for call in fake.calls[calls:]] == ["t1"]


def looked(paths: Sequence[str]) -> bool:
    """Whether these requests show that a look for the proxy failed.

    A client whose kept connection breaks off asks again at once, and that may be answered.
    """
    return sum(path.endswith("/v1/models") for path in paths) >= 2


def missed(fake: FakeProxy) -> bool:
    """Whether calls were turned away, and after the last of them whoever looked why."""
    calls = [at for at, path in enumerate(fake.turned_away) if path.endswith("/completions")]
    return bool(calls) and looked(fake.turned_away[calls[-1] :])


async def run_while_away(runner: Runner, fake: FakeProxy, who: str) -> Outcome:
    """Run the tasks; the proxy (`down`) or model server (`no_model`) is away until it is missed."""
    process = await runner.start(*COMMAND, "-n", "3", "-k", "2", "--answer", "a")
    await runner.until_settled(4 if who == "down" else 2)
    setattr(fake, who, True)
    await until(lambda: missed(fake))
    setattr(fake, who, False)
    return await ended(process)


async def test_run_that_fails_during_a_proxy_restart_is_repeated(
    fake: FakeProxy, runner: Runner
) -> None:
    """Runs that fail because it is away are done again; what it did not take is told again."""
    fake.feedback_status = [503, 500, 429, 401, 403, 404]
    outcome = await run_while_away(runner, fake, "down")
    assert outcome.status == 0, outcome.errors
    assert outcome.summary["runs"] == 18
    assert outcome.summary["failed"] == 0
    assert len(fake.rewards()) == 18


async def test_no_run_fails_while_the_model_server_restarts(
    fake: FakeProxy, runner: Runner
) -> None:
    """The proxy is there, and passes on that nobody is behind it."""
    outcome = await run_while_away(runner, fake, "no_model")
    assert outcome.status == 0, outcome.errors
    assert outcome.summary["failed"] == 0
    assert outcome.summary["errors"].keys() == {"proxy away"}
    assert len(fake.rewards()) == 18


async def test_run_that_fails_after_a_proxy_outage_is_repeated(
    fake: FakeProxy, runner: Runner
) -> None:
    """Agents wait before they give up, and the proxy may be back by then."""
    runner.write([{"id": "t1", "do": "exit late"}])
    process = await runner.start(*COMMAND)
    await until(lambda: len(fake.calls) == 1)
    fake.down = True
    await until(lambda: looked(fake.turned_away))
    fake.down = False
    outcome = await ended(process)
    assert outcome.summary["errors"] == {"proxy away": 1, "exit status 3": 1}
    assert len(fake.calls) == 2


async def test_refused_feedback_is_counted_and_not_repeated(
    fake: FakeProxy, runner: Runner
) -> None:
    fake.feedback_status = [400, 413, 422]
    outcome = await runner.run(*COMMAND, "--answer", "a")
    assert outcome.status == 1
    assert outcome.summary["errors"] == {"feedback refused": 3}
    assert len(fake.rewards()) == 3
    assert (await runner.run(*COMMAND, "--answer", "a")).status == 0
    assert len(fake.rewards()) == 3


async def test_ctrl_c_lets_runs_finish_and_the_same_command_resumes(
    fake: FakeProxy, runner: Runner
) -> None:
    runner.write([task | {"seconds": 0.3} for task in TASKS])
    options = (*COMMAND, "-k", "2", "--answer", "a")
    process = await runner.start(*options)
    await until(lambda: len(fake.calls) >= 2)
    os.kill(process.pid, signal.SIGINT)
    outcome = await ended(process)
    assert outcome.status == 130
    assert 2 <= outcome.summary["runs"] == len(fake.rewards()) < 6
    assert outcome.summary["abandoned"] == 0
    assert (await runner.run(*options)).status == 0
    assert len(fake.rewards()) == len(fake.calls) == 6


@pytest.mark.parametrize(
    "how", [COMMAND, ("--python", "agent:answer")], ids=["program", "function"]
)
async def test_sigterm_abandons_runs_that_are_under_way(
    fake: FakeProxy, runner: Runner, how: tuple[str, str]
) -> None:
    runner.write([task | {"do": "hang"} for task in TASKS])
    process = await runner.start(*how, "-k", "2")
    await until(lambda: len(fake.calls) >= 2)
    process.terminate()
    outcome = await asyncio.wait_for(ended(process), 20)
    assert outcome.status == 130
    assert outcome.summary["runs"] == 0
    assert {one["metric"] for one in fake.statements} == {"run_abandoned"}
