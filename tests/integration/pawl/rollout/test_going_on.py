"""`pawl rollout` that is stopped, killed, or left alone by proxy and model server: it goes on."""

import asyncio
import os
import signal
from collections.abc import Sequence

import pytest

from tests.support.rollouts import COMMAND, TASKS, Outcome, Runner, ended
from tests.support.servers.fake_proxy import FakeProxy
from tests.support.waiting import until


async def test_failed_runs_can_be_run_again(fake: FakeProxy, runner: Runner) -> None:
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


async def test_run_that_fails_while_the_proxy_restarts_is_made_again(
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


async def test_absence_that_is_over_when_the_run_fails_counts_too(
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


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_refused_feedback_is_counted_and_not_repeated(
    fake: FakeProxy, runner: Runner, status: int
) -> None:
    fake.feedback_status = [status]
    outcome = await runner.run(*COMMAND, "--answer", "a")
    assert outcome.status == 1
    assert outcome.summary["errors"] == {"feedback refused": 1}
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
