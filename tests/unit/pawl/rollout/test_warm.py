"""Warm workers: they end when they are to, whatever the function has left behind."""

import asyncio
import os
import venv
from pathlib import Path

import pytest

from pawl.rollout.addresses import Request
from pawl.rollout.agents.warm import ALONE, Function, WarmAgent
from pawl.rollout.errors import WorkerCrashed

AGENT = """
import asyncio, os, time

def daemon(task):
    if os.fork() == 0:
        os.setsid()
        open("pid", "w").write(str(os.getpid()))
        time.sleep(60)
        os._exit(0)
    while not os.path.exists("pid"):
        time.sleep(0.01)
    time.sleep(task.get("seconds", 0))
    return "well"

def environment(task):
    return dict(os.environ)

def leave_a_child(task):
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    os._exit(3)

def large(task):
    return "x" * 9_000_000

async def large_together(task, base_url):
    await asyncio.sleep(task.get("after", 0))
    return "x" * task.get("size", 9_000_000)

async def together(task, base_url):
    await asyncio.sleep(task.get("after", 0))
    if "status" in task:
        os._exit(task["status"])
    return os.getpid()


def packages(task):
    import importlib.util, sys
    return [sys.prefix, *(name for name in ("pawl", "msgspec") if importlib.util.find_spec(name))]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "agent.py").write_text(AGENT)
    return tmp_path


def agent(folder: Path, name: str) -> WarmAgent:
    return WarmAgent(Function(name=f"agent:{name}", log_file=folder / "log", folder=folder))


def request(
    limit_s: float = 20.0,
    environment: dict[str, str] | None = None,
    *,
    alone: bool = False,
    **task: object,
) -> Request:
    return Request(
        episode="e",
        task=task,
        base_url="",
        model=None,
        environment=environment or {},
        limit_s=limit_s,
        alone=alone,
    )


@pytest.mark.parametrize("seconds", [0, 60])
async def test_a_daemon_that_has_the_pipes_holds_nobody_up(folder: Path, seconds: int) -> None:
    warm = agent(folder, "daemon")
    await warm.start(1)
    try:
        result = await warm.run(request(limit_s=2 if seconds else 30, seconds=seconds))
        assert result.error == ("time limit" if seconds else None)
        async with asyncio.timeout(30):
            await warm.stop()
    finally:
        os.kill(int((folder / "pid").read_text()), 9)


async def test_a_crash_is_seen_though_a_child_of_the_worker_has_its_pipes(folder: Path) -> None:
    warm = agent(folder, "leave_a_child")
    await warm.start(1)
    result = await warm.run(request(limit_s=20))
    await warm.stop()
    assert result.error == "exit status 3"


async def test_more_than_can_be_kept_is_said_and_costs_no_other_run(folder: Path) -> None:
    for name in ("large", "large_together"):
        warm = agent(folder, name)
        await warm.start(1)
        runs = [request(), request(after=0.5, size=1)] if "together" in name else [request()]
        results = await asyncio.gather(*map(warm.run, runs))
        await warm.stop()
        assert [one.error for one in results] == ["too much output", None][: len(runs)]
        assert "1048576 characters" in results[0].detail


async def test_settings_and_log_are_nobody_elses_business(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://secret")
    monkeypatch.setenv("PAWL_DATA_DIR", "secret")
    warm = agent(folder, "environment")
    await warm.start(1)
    result = await warm.run(request())
    await warm.stop()
    assert result.error is None
    assert "secret" not in result.output
    assert (folder / "log").stat().st_mode & 0o777 == 0o600


async def test_a_task_that_no_variable_can_hold_is_not_that_of_the_run_before(
    folder: Path,
) -> None:
    warm = agent(folder, "environment")
    await warm.start(1)
    results = [await warm.run(request(environment=env)) for env in ({"ROLLOUT_TASK": "{}"}, {})]
    await warm.stop()
    assert ["ROLLOUT_TASK" in result.output for result in results] == [True, False]


async def test_a_crash_is_nobodys_failure_where_several_ran_and_one_runs_own_alone(
    folder: Path,
) -> None:
    warm = agent(folder, "together")
    await warm.start(8)
    crash = {"status": 3, "after": 0.5}
    runs = [request(**task) for task in ({"after": 9}, crash, {"after": 9})]
    ends = await asyncio.gather(*map(warm.run, runs), return_exceptions=True)
    assert [type(end) for end in ends] == [WorkerCrashed] * 3
    # The one that shares a worker with nobody is to blame, wherever it runs.
    assert (await warm.run(request(status=3))).error == "exit status 3"
    assert (await warm.run(request(status=3, alone=True))).error == "exit status 3"
    await warm.stop()


async def test_runs_alone_share_no_worker_with_others_and_there_are_a_few_of_them(
    folder: Path,
) -> None:
    warm = agent(folder, "together")
    await warm.start(16)
    runs = [request(after=0.2, alone=alone) for alone in (True, False) for _ in range(ALONE + 2)]
    results = await asyncio.gather(*map(warm.run, runs))
    alone, shared = (
        [r.value for r in results[part]] for part in (slice(ALONE + 2), slice(ALONE + 2, None))
    )
    assert len(set(alone)) == ALONE
    assert len(set(shared)) == 1
    assert not set(alone) & set(shared)
    # A crash among those that are alone is no other's.
    runs = [request(after=1, alone=True), request(status=3, alone=True), request(after=1)]
    results = await asyncio.gather(*map(warm.run, runs))
    assert [result.error for result in results] == [None, "exit status 3", None]
    await warm.stop()


async def test_another_python_runs_the_function_with_nothing_of_ours_installed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    other = folder / "other"
    venv.create(other, symlinks=True)
    function = Function(
        name="agent:packages",
        log_file=folder / "log",
        folder=folder,
        interpreter=str(other / "bin" / "python"),
    )
    warm = WarmAgent(function)
    await warm.start(1)
    result = await warm.run(request())
    await warm.stop()
    assert result.value == [str(other)]
