"""Python functions in processes: what they get, how they fail, and that their processes end."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from pawl.rollout.agents import Request, Result
from pawl.rollout.functions import FunctionAgent
from pawl.rollout.tasks import RolloutError
from tests.support.waiting import until

AGENT = """
import asyncio, os, sys, time

LOOPS = []


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError


def answer(task):
    match task.get("do"):
        case "raise":
            raise ValueError("no idea")
        case "cancel":
            raise asyncio.CancelledError
        case "interrupt":
            raise KeyboardInterrupt
        case "group":
            raise BaseExceptionGroup("several", [asyncio.CancelledError()])
        case "unspeakable":
            raise Unspeakable
        case "exit":
            sys.exit(3)
        case "leave":
            os._exit(3)
        case "die":
            os.kill(os.getpid(), 9)
        case "hang":
            time.sleep(60)
        case "flood":
            return "x" * 3_000_000
        case "no json":
            return {1, 2}
        case "object":
            return {"a": ["ä", None]}
        case "nothing":
            return None
        case "environment":
            return dict(os.environ)
        case "own loop":
            return asyncio.run(later(task))
        case "print":
            print("printed")
        case "daemon":
            if os.fork() == 0:
                os.setsid()
                open("daemon", "w").write(str(os.getpid()))
                time.sleep(60)
                os._exit(0)
            while not os.path.exists("daemon"):
                time.sleep(0.01)
    time.sleep(task.get("seconds", 0))
    return str(os.getpid())


async def later(task):
    LOOPS.append(asyncio.get_running_loop())
    assert len(set(map(id, LOOPS))) == 1 or task
    await asyncio.sleep(task.get("seconds", 0))
    return "well"
"""
Start = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "agent.py").write_text(AGENT)
    return tmp_path


@pytest.fixture
async def start(folder: Path) -> AsyncIterator[Start]:
    """Start an agent, which is stopped in the end."""
    async with AsyncExitStack() as exits:

        async def started(name: str = "agent:answer", at_once: int = 1) -> FunctionAgent:
            agent = FunctionAgent(name, folder / "log", at_once, folder=folder)
            exits.push_async_callback(agent.stop)
            await agent.start()
            return agent

        yield started


async def call(
    agent: FunctionAgent,
    limit_s: float = 60.0,
    variables: dict[str, str] | None = None,
    **task: Any,
) -> Result:
    return await agent.run(Request(task=task, environment=variables or {}, limit_s=limit_s))


@pytest.mark.parametrize(
    ("do", "error"),
    [
        ("raise", "raised ValueError"),
        ("cancel", "raised CancelledError"),
        ("interrupt", "raised KeyboardInterrupt"),
        ("group", "raised BaseExceptionGroup"),
        ("unspeakable", "raised Unspeakable"),
        ("exit", "exit status 3"),
        ("leave", "crashed"),
        ("die", "crashed"),
        ("flood", "too much output"),
        ("no json", "raised TypeError"),
        ("well", None),
    ],
)
async def test_failure_of_a_function_is_named_and_the_next_run_succeeds(
    start: Start, do: str, error: str | None
) -> None:
    agent = await start()
    result = await call(agent, do=do)
    assert result.error == error
    if do == "raise":
        assert "no idea" in result.detail
        assert "in answer" in result.errors
    assert (await call(agent)).error is None


async def test_hung_function_costs_its_own_run_alone(start: Start) -> None:
    agent = await start(at_once=3)
    began = time.monotonic()
    results = await asyncio.gather(
        call(agent, do="hang", limit_s=2), call(agent, seconds=4), call(agent, do="leave")
    )
    assert time.monotonic() - began < 50
    assert [result.error for result in results] == ["time limit", None, "crashed"]
    assert results[0].detail == "not done within 2 s"
    assert (await call(agent)).error is None


@pytest.mark.parametrize(
    ("do", "output"),
    [("object", '{"a": ["ä", null]}'), ("nothing", ""), ("own loop", "well")],
)
async def test_return_value_of_the_agent_function_is_the_output_of_the_run(
    start: Start, do: str, output: str
) -> None:
    result = await call(await start(), do=do)
    assert result.output == output


async def test_idle_process_is_used_before_another_is_started(start: Start) -> None:
    agent = await start(at_once=4)
    one_at_a_time = {(await call(agent)).output for _ in range(3)}
    assert len(one_at_a_time) == 1
    at_once = await asyncio.gather(*(call(agent, seconds=2) for _ in range(4)))
    assert len({result.output for result in at_once}) == 4


async def test_coroutine_functions_of_an_agent_process_share_its_event_loop(start: Start) -> None:
    agent = await start("agent:later")
    for _ in range(3):
        assert (await call(agent)).output == "well"


async def test_agent_function_gets_only_the_environment_variables_of_its_own_run(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://secret")
    monkeypatch.setenv("PAWL_DATA_DIR", "secret")
    agent = await start()
    given: list[dict[str, str]] = [{"ROLLOUT_TASK": "{}", "OPENAI_MODEL": "m"}, {}]
    outputs = [
        (await call(agent, do="environment", variables=variables)).output for variables in given
    ]
    assert '"OPENAI_MODEL": "m"' in outputs[0]
    assert "secret" not in "".join(outputs)
    # That of the run before is no task of this run.
    assert ["ROLLOUT_TASK" in output for output in outputs] == [True, False]
    await call(agent, do="print")
    assert (folder / "log").read_text() == "printed\n"
    assert (folder / "log").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("seconds", [0, 60])
async def test_daemon_left_by_a_function_delays_neither_result_nor_stop(
    start: Start, folder: Path, seconds: int
) -> None:
    """A detached daemon survives the agent; nobody waits for it."""
    agent = await start()
    try:
        result = await call(agent, do="daemon", seconds=seconds, limit_s=3 if seconds else 60)
        assert result.error == ("time limit" if seconds else None)
        async with asyncio.timeout(30):
            await agent.stop()
    finally:
        os.kill(int((folder / "daemon").read_text()), 9)


async def test_stopped_agent_leaves_no_process(start: Start) -> None:
    """`stop` ends the idle process; that of the cancelled call was killed before."""
    agent = await start(at_once=2)
    running = asyncio.create_task(call(agent, do="hang"))
    pid = int((await call(agent)).output)
    running.cancel()
    await asyncio.wait([running])
    await agent.stop()
    await until(lambda: not psutil.pid_exists(pid))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("agent", "it must be MODULE:FUNCTION"),
        ("nowhere:f", "there is no module 'nowhere' in"),
        ("agent:nope", "the module 'agent' has no 'nope'"),
        ("agent:LOOPS", "agent:LOOPS is not a function"),
        ("broken:f", "ZeroDivisionError"),
        ("ends:f", "SystemExit"),
        ("leaves:f", "its process ended"),
    ],
)
async def test_function_that_cannot_be_imported_is_refused_with_the_reason(
    start: Start, folder: Path, name: str, message: str
) -> None:
    (folder / "broken.py").write_text("1 / 0\n")
    (folder / "ends.py").write_text("import sys\nsys.exit()\n")
    (folder / "leaves.py").write_text("import os\nos._exit(1)\n")
    with pytest.raises(RolloutError, match=f"--python {name}: .*{message}"):
        await start(name)


async def test_process_that_cannot_be_started_is_named_with_the_reason(folder: Path) -> None:
    agent = FunctionAgent("agent:answer", folder / "nowhere" / "log", 1, folder=folder)
    with pytest.raises(RolloutError, match=r"its process cannot be started: .*nowhere"):
        await agent.start()
