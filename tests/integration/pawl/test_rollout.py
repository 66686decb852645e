"""`pawl rollout` as a process, beside a stand-in for the proxy: agents, limits, ends, messages."""

import asyncio
import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from pawl.rollout.agents.warm import Function, WarmAgent
from pawl.rollout.command import run_rollout
from pawl.rollout.errors import RolloutError
from pawl.rollout.options import RolloutOptions
from tests.integration.conftest import free_port
from tests.support.rollouts import Runner, ended, kill, until
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


@pytest.mark.parametrize("agent", ["command", "agent:answer", "agent:alone"])
async def test_a_run_that_fails_has_no_reward_and_says_why(
    fake: FakeProxy, runner: Runner, agent: str
) -> None:
    kinds = ["exit", "raise", "hang", "die", "flood", "no json", "well"]
    runner.write([{"id": kind, "do": kind} for kind in kinds if kind != "no json" or ":" in agent])
    how = COMMAND if agent == "command" else ("--python", agent)
    told = await runner.run(*how, "--timeout", "6", "-k", "7", "--answer", "id")
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
    assert runner.by_task()["hang"].detail == "not done within 6 s"
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


async def test_what_failed_can_be_run_again(fake: FakeProxy, runner: Runner) -> None:
    runner.write([{"id": "t0"}, {"id": "t1", "do": "exit"}])
    assert (await runner.run(*COMMAND)).status == 1
    calls = len(fake.calls)
    assert (await runner.run(*COMMAND)).status == 1
    assert len(fake.calls) == calls
    assert (await runner.run(*COMMAND, "--again")).status == 1
    assert [call["task"] for call in fake.calls[calls:]] == ["t1"]


@pytest.mark.parametrize("how", [COMMAND, ("--python", "agent:answer")], ids=["program", "warm"])
async def test_killed_and_started_again_none_is_lost_and_none_doubled(
    fake: FakeProxy, runner: Runner, how: tuple[str, str]
) -> None:
    options = (*how, "-n", "4", "-k", "4", "--answer", "a")
    runner.write([task | {"seconds": 0.05} for task in TASKS])
    for settled in (3, 9, 15):
        process = await runner.start(*options)
        await runner.until_settled(settled)
        await kill(process)
    told = await runner.run(*options)
    assert told.status == 0, told.errors
    assert told.summary["runs"] == 24
    assert told.summary["abandoned"] >= 1
    settled_runs = runner.settled()
    assert Counter(key.task for key, _ in settled_runs) == {f"t{n}": 4 for n in range(6)}
    rewards = fake.rewards()
    assert rewards.keys() == {finished.episode for _, finished in settled_runs}
    assert all(len(values) == 1 for values in rewards.values())
    abandoned = {one["episode"] for one in fake.statements if one["metric"] == "run_abandoned"}
    assert not abandoned & rewards.keys()
    assert {call["episode"] for call in fake.calls} <= abandoned | rewards.keys()


async def test_nothing_is_lost_while_the_proxy_restarts(fake: FakeProxy, runner: Runner) -> None:
    """Runs that fail because it is away are done again; what it did not take is told again."""
    fake.feedback_status = [503, 500, 429, 401, 403, 404]
    process = await runner.start(*COMMAND, "-n", "3", "-k", "2", "--answer", "a")
    await runner.until_settled(4)
    fake.down = True
    await asyncio.sleep(1)
    fake.down = False
    told = await ended(process)
    assert told.status == 0, told.errors
    assert told.summary["runs"] == 18
    assert told.summary["failed"] == 0
    assert len(fake.rewards()) == 18


async def test_no_run_fails_while_the_model_server_restarts(
    fake: FakeProxy, runner: Runner
) -> None:
    """The proxy is there, and passes on that nobody is behind it."""
    process = await runner.start(*COMMAND, "-n", "3", "-k", "2", "--answer", "a")
    await runner.until_settled(2)
    fake.no_model = True
    await asyncio.sleep(1.5)
    fake.no_model = False
    told = await ended(process)
    assert told.status == 0, told.errors
    assert told.summary["failed"] == 0
    assert told.summary["errors"].keys() == {"proxy away"}
    assert len(fake.rewards()) == 18


async def test_an_absence_that_is_over_when_the_run_fails_counts_too(
    fake: FakeProxy, runner: Runner
) -> None:
    """Agents wait before they give up, and the proxy may be back by then."""
    runner.write([{"id": "t1", "do": "exit late"}])
    process = await runner.start(*COMMAND)
    await until(lambda: len(fake.calls) == 1)
    fake.down = True
    await asyncio.sleep(1.5)
    fake.down = False
    told = await ended(process)
    assert told.summary["errors"] == {"proxy away": 1, "exit status 3": 1}
    assert len(fake.calls) == 2


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_what_feedback_refuses_is_said_and_not_repeated(
    fake: FakeProxy, runner: Runner, status: int
) -> None:
    fake.feedback_status = [status]
    told = await runner.run(*COMMAND, "--answer", "a")
    assert told.status == 1
    assert told.summary["refused"] == 1
    assert len(fake.rewards()) == 5
    assert (await runner.run(*COMMAND, "--answer", "a")).status == 0
    assert len(fake.rewards()) == 5


async def test_ctrl_c_lets_runs_end_and_the_same_command_goes_on(
    fake: FakeProxy, runner: Runner
) -> None:
    runner.write([task | {"seconds": 0.3} for task in TASKS])
    options = (*COMMAND, "-k", "2", "--answer", "a")
    process = await runner.start(*options)
    await until(lambda: len(fake.calls) >= 2)
    os.kill(process.pid, signal.SIGINT)
    told = await ended(process)
    assert told.status == 130
    assert 2 <= told.summary["runs"] == len(fake.rewards()) < 6
    assert told.summary["abandoned"] == 0
    assert (await runner.run(*options)).status == 0
    assert len(fake.rewards()) == len(fake.calls) == 6


@pytest.mark.parametrize("how", [COMMAND, ("--python", "agent:answer")], ids=["program", "warm"])
async def test_sigterm_gives_up_what_is_under_way(
    fake: FakeProxy, runner: Runner, how: tuple[str, str]
) -> None:
    runner.write([task | {"do": "hang"} for task in TASKS])
    process = await runner.start(*how, "-k", "2")
    await until(lambda: len(fake.calls) >= 2)
    process.terminate()
    told = await asyncio.wait_for(ended(process), 20)
    assert told.status == 130
    assert told.summary["runs"] == 0
    assert {one["metric"] for one in fake.statements} == {"run_abandoned"}


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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"command": None}, "say what to run with --command"),
        ({"python": "agent:answer"}, "one of the two"),
        ({"interpreter": "python"}, "--interpreter is the Python of --python"),
        (
            {"interpreter": "no/python", "command": None, "python": "agent:answer"},
            "--interpreter: no/python is no program that can be run",
        ),
        ({"command": "no-such-program x"}, "--command: the program 'no-such-program' is not"),
        ({"command": "a 'b"}, "--command cannot be split into words"),
        ({"judge": "no-such-judge"}, "--judge: the judge's program 'no-such-judge'"),
        ({"judge": "x", "answer": "a"}, "--judge, --judge-python and --answer all score"),
        ({"answer": "b"}, "line 1: the task has no field 'b', which --answer names"),
        ({"policy": "x"}, "the proxy has no policy 'x'; its models are m, m@1, m@2"),
        ({"policy": "m@9"}, "m@9 is not loaded; there are m@0, m@1, m@2"),
        ({"every_version": True}, "--every-version needs --policy NAME"),
        ({"policy": "m@1", "every_version": True}, "name the policy alone"),
        ({"policy": "m", "every_version": True, "split": "train"}, "needs --split eval"),
        ({"tasks": Path("none.jsonl")}, "--tasks: none.jsonl cannot be read"),
        ({"tasks": Path("agent.py")}, "agent.py, line 2 is no task"),
        ({"journal": Path("tasks.jsonl")}, "--journal: line 1 of tasks.jsonl is no line"),
        (
            {"journal": Path("j.log"), "command": None, "python": "agent:answer"},
            "--journal: j.log is where --python prints to; name another file, such as j.jsonl",
        ),
        ({"journal": Path()}, "--journal: . cannot be opened"),
        ({"summary": Path("agent.py/s.json")}, "--summary: agent.py/s.json cannot be written"),
    ],
)
@pytest.mark.usefixtures("runner")
async def test_what_cannot_be_run_is_said_with_its_option(
    fake: FakeProxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    usual: dict[str, Any] = {"tasks": Path("tasks.jsonl"), "url": fake.url, "command": "cat"}
    metrics_url = f"{fake.url}/metrics"
    with pytest.raises(RolloutError, match=re.escape(said)):
        await run_rollout(RolloutOptions(**(usual | options), metrics_url=metrics_url))


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("agent", "it must be MODULE:FUNCTION"),
        ("nowhere:f", "there is no module 'nowhere' in"),
        ("agent:nope", "the module 'agent' has no 'nope'"),
        ("agent:STARTED", "agent:STARTED is not a function"),
        ("broken:f", "ZeroDivisionError"),
    ],
)
@pytest.mark.usefixtures("runner")
async def test_a_function_that_cannot_be_imported_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text("1 / 0\n")
    agent = WarmAgent(Function(name=function, log_file=tmp_path / "log"))
    with pytest.raises(RolloutError, match=f"--python {function}: .*{said}"):
        await agent.start(1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--split", "test"), "pawl: --split is train or eval, not 'test'\n"),
        (("--url", "localhost:1"), "pawl: --url: 'localhost:1' is no http:// or https:// URL\n"),
    ],
)
async def test_an_error_is_one_line(runner: Runner, options: tuple[str, ...], said: str) -> None:
    told = await runner.run(*COMMAND, *options)
    assert (told.status, told.errors) == (2, said)


async def test_the_proxy_must_be_there(runner: Runner) -> None:
    runner.url = f"http://127.0.0.1:{free_port()}"
    told = await runner.run(*COMMAND)
    assert told.status == 2
    assert f"no proxy answers at {runner.url}" in told.errors
    assert "`pawl up`, or say with --url where it is" in told.errors


async def test_another_server_is_not_taken_for_the_proxy(runner: Runner) -> None:
    async def missing(request: web.Request) -> web.Response:
        return web.Response(status=404)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", missing)
    apprunner = web.AppRunner(app)
    await apprunner.setup()
    await web.TCPSite(apprunner, "127.0.0.1", port := free_port()).start()
    runner.url = f"http://127.0.0.1:{port}"
    told = await runner.run(*COMMAND)
    await apprunner.cleanup()
    assert told.status == 2
    assert "is not Pawl's proxy" in told.errors


async def test_another_plan_wants_another_journal(runner: Runner) -> None:
    assert (await runner.run(*COMMAND)).status == 0
    told: Any = await runner.run(*COMMAND, "-n", "2")
    assert told.status == 2
    assert "is of a rollout with another -n: name another file for this one" in told.errors
