"""What `pawl rollout` cannot run is said in one line, with the option that is to blame."""

import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from benchmarks.stack import free_port
from pawl.commands.rollout import RolloutFlags, run_rollout
from pawl.rollout.tasks import RolloutError
from tests.support.rollouts import COMMAND, TASKS, Runner
from tests.support.servers.fake_proxy import FakeProxy

Rollout = Callable[..., Awaitable[dict[str, Any]]]
ADVICE = "http:// or https:// URL: give the address that `pawl proxy` or `pawl up` prints"


@pytest.fixture
def rollout(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> Rollout:
    """Run `pawl rollout` in this process."""
    monkeypatch.chdir(runner.folder)

    async def run(**options: Any) -> dict[str, Any]:
        usual = {"tasks": Path("tasks.jsonl"), "url": runner.url, "command": ["cat"]}
        return await run_rollout(RolloutFlags(**(usual | options)))

    return run


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"command": None}, "say what to run with `-- PROGRAM ARGUMENTS` at the end"),
        ({"python": "agent:answer"}, "one of the two"),
        ({"command": ["no-such-program", "x"]}, "the program 'no-such-program' is not found"),
        ({"judge": "no-such-judge"}, "--judge: the judge's program 'no-such-judge'"),
        ({"judge": "x", "answer": "a"}, "--judge and --answer both score a run"),
        ({"answer": "b"}, "line 1: the task has no field 'b', which --answer names"),
        ({"hide": ("a", "b")}, "--hide: no task of tasks.jsonl has a field 'b'"),
        ({"policy": "x"}, "the proxy has no 'x'; its models are m, m@1, m@2"),
        ({"policy": "m@9"}, "the proxy has no 'm@9'; its models are m, m@1, m@2"),
        ({"split": "test"}, "--split is train or eval, not 'test'"),
        *(
            ({"url": url}, f"--url: {url!r} is no {ADVICE}")
            for url in ("localhost:1", "http://", "http://[::1", "http://h:port", "http://h:99999")
        ),
        ({"tasks": Path("none.jsonl")}, "--tasks: none.jsonl cannot be read"),
        ({"tasks": Path("agent.py")}, "agent.py, line 2 is no task"),
        ({"journal": Path("agent.py")}, "--journal: line 1 of agent.py is no line"),
        ({"journal": Path()}, "--journal: . cannot be opened"),
        ({"journal": Path("tasks.jsonl")}, "--tasks and --journal would be one file, tasks.jsonl:"),
        ({"journal": Path("agent.py/j")}, "--journal: agent.py/j cannot be opened"),
    ],
)
async def test_rollout_refuses_an_unusable_option_by_name(
    rollout: Rollout, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RolloutError, match=re.escape(message)):
        await rollout(**options)


async def test_invalid_proxy_address_is_refused_in_a_single_line(runner: Runner) -> None:
    outcome = await runner.run(*COMMAND, "--url", "http://[::1")
    assert (outcome.status, outcome.errors) == (2, f"pawl: --url: 'http://[::1' is no {ADVICE}\n")


@pytest.mark.parametrize("suffix", ["/v1/", "/", "/v1"])
async def test_proxy_address_may_end_with_v1_or_a_slash(
    fake: FakeProxy, runner: Runner, rollout: Rollout, suffix: str
) -> None:
    runner.write(TASKS[:1])
    summary = await rollout(url=fake.url + suffix, command=[*COMMAND[1:]])
    assert (summary["runs"], summary["failed"], len(fake.calls)) == (1, 0, 1)


async def test_missing_proxy_is_reported(rollout: Rollout) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(RolloutError) as said:
        await rollout(url=url)
    assert f"no proxy answers at {url}" in str(said.value)
    assert "`pawl up`, or say with --url where it is" in str(said.value)


async def test_another_server_is_not_taken_for_the_proxy(rollout: Rollout) -> None:
    async def missing(request: web.Request) -> web.Response:
        return web.Response(status=404)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", missing)
    apprunner = web.AppRunner(app)
    await apprunner.setup()
    await web.TCPSite(apprunner, "127.0.0.1", port := free_port()).start()
    with pytest.raises(RolloutError, match="is not Pawl's proxy"):
        await rollout(url=f"http://127.0.0.1:{port}")
    await apprunner.cleanup()
