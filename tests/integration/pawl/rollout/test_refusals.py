"""What `pawl rollout` cannot run is said in one line, with the option that is to blame."""

import re
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from benchmarks.stack import free_port
from pawl.rollout.agents.warm import Function, WarmAgent
from pawl.rollout.command import run_rollout
from pawl.rollout.errors import RolloutError
from pawl.rollout.options import RolloutOptions
from tests.integration.pawl.rollout.test_rollout import COMMAND, fake, runner
from tests.support.rollouts import Runner
from tests.support.servers.fake_proxy import FakeProxy

__all__ = ["fake", "runner"]
ADVICE = "http:// or https:// URL: give the address that `pawl proxy` or `pawl up` prints"


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
        ({"hide": ("a", "b")}, "--hide: no task of tasks.jsonl has a field 'b'"),
        ({"policy": "x"}, "the proxy has no policy 'x'; its models are m, m@1, m@2"),
        ({"policy": "m@9"}, "m@9 is not loaded; there are m@0, m@1, m@2"),
        ({"every_version": True}, "--every-version needs --policy NAME"),
        ({"policy": "m@1", "every_version": True}, "name the policy alone"),
        ({"policy": "m", "every_version": True, "split": "train"}, "needs --split eval"),
        ({"tasks": Path("none.jsonl")}, "--tasks: none.jsonl cannot be read"),
        ({"tasks": Path("agent.py")}, "agent.py, line 2 is no task"),
        ({"journal": Path("agent.py")}, "--journal: line 1 of agent.py is no line"),
        ({"journal": Path()}, "--journal: . cannot be opened"),
        ({"journal": Path("tasks.jsonl")}, "--tasks and --journal would be one file, tasks.jsonl:"),
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
        ("ends:f", r"the worker ended with exit status 0\."),
    ],
)
@pytest.mark.usefixtures("runner")
async def test_a_function_that_cannot_be_imported_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text("1 / 0\n")
    Path("ends.py").write_text("import sys\nsys.exit()\n")
    agent = WarmAgent(Function(name=function, log_file=tmp_path / "log"))
    with pytest.raises(RolloutError, match=f"--python {function}: .*{said}"):
        await agent.start(1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--split", "test"), "pawl: --split is train or eval, not 'test'\n"),
        (("--url", "http://[::1"), f"pawl: --url: 'http://[::1' is no {ADVICE}\n"),
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
