"""Warm workers: they end when they are to, whatever the function has left behind."""

import asyncio
import os
import venv
from pathlib import Path

import pytest

from pawl.rollout.addresses import Request
from pawl.rollout.agents.warm import Function, WarmAgent

AGENT = """
import os, time

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
    limit_s: float = 20.0, environment: dict[str, str] | None = None, **task: object
) -> Request:
    return Request(
        episode="e",
        task=task,
        base_url="",
        model=None,
        environment=environment or {},
        limit_s=limit_s,
    )


@pytest.mark.parametrize("seconds", [0, 60])
async def test_a_daemon_that_has_the_pipes_holds_nobody_up(folder: Path, seconds: int) -> None:
    warm = agent(folder, "daemon")
    await warm.start(1)
    try:
        result = await warm.run(request(limit_s=2, seconds=seconds))
        assert result.error == ("time limit" if seconds else None)
        async with asyncio.timeout(10):
            await warm.stop()
    finally:
        os.kill(int((folder / "pid").read_text()), 9)


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
