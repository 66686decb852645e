"""Processes of their own: the proxy stays small and without torch, the stack's are kept up.

One whose event loop hangs ends itself, and is started again.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import psutil
import pytest

from benchmarks.stack import free_port
from pawl.stack.process import Process
from tests.conftest import ROOT
from tests.support.servers.fake_upstream import FakeUpstream
from tests.support.waiting import eventually, until

MIB = 2**20


@pytest.fixture
async def process(
    database_url: str, upstream: FakeUpstream, tmp_path: Path
) -> AsyncIterator[tuple[psutil.Process, str]]:
    """`pawl proxy`, as a user starts it."""
    port, admin = free_port(), free_port()
    # A user's project may have a package of that name, in the folder where Pawl is started.
    (tmp_path / "proxy").mkdir()
    (tmp_path / "proxy" / "__init__.py").write_text("raise ImportError('not Pawl's')\n")
    environment = {
        "PATH": os.environ["PATH"],
        "DATABASE_URL": database_url,
        "PAWL_UPSTREAM_URL": upstream.url,
        "PAWL_LISTEN": f"127.0.0.1:{port}",
        "PAWL_ADMIN_LISTEN": f"127.0.0.1:{admin}",
        "PAWL_SPOOL_DIR": str(tmp_path / "spool"),
    }
    started = await asyncio.create_subprocess_exec(
        *(str(Path(sys.executable).with_name("pawl")), "proxy"),
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(ROOT)},
        stderr=asyncio.subprocess.DEVNULL,
    )
    async with aiohttp.ClientSession() as session:

        async def ready() -> bool:
            try:
                async with session.get(f"http://127.0.0.1:{admin}/readyz") as response:
                    return (await response.json())["database"] == "up"
            except aiohttp.ClientError:
                return False

        await eventually(ready)
    yield psutil.Process(started.pid), f"http://127.0.0.1:{port}"
    started.terminate()
    assert await started.wait() == 0


async def test_proxy_stays_below_120_mib_and_loads_no_torch(
    process: tuple[psutil.Process, str], upstream: FakeUpstream
) -> None:
    proxy, url = process
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * 4000}], "stream": True}
    async with aiohttp.ClientSession() as session:
        for _ in range(10):
            posts = [session.post(f"{url}/v1/chat/completions", json=body) for _ in range(50)]
            for response in await asyncio.gather(*posts):
                assert response.status == 200
                await response.read()
    assert proxy.memory_info().rss <= 120 * MIB
    maps = Path(f"/proc/{proxy.pid}/maps").read_text()
    assert "torch" not in maps
    assert "numpy" not in maps


# A server with a child of its own, as vLLM has its engine.
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def started_by(process: Process, number: int) -> int:
    """The child of the process that was started as this one, which prints its number."""

    async def printed() -> list[str]:
        log = process.log_file
        return log.read_text().split()[number:] if log.exists() else []

    return int((await eventually(printed))[0])


async def test_killed_process_is_restarted_and_its_children_end_with_it(tmp_path: Path) -> None:
    process = Process("p", [sys.executable, "-c", PARENT], os.environ, tmp_path)
    await process.start()
    child, first = await started_by(process, 0), process.pid
    assert first is not None
    os.kill(first, 9)
    await until(lambda: process.pid != first and alive(process.pid or 0))
    await until(lambda: not alive(child))
    assert process.restarts == 1
    child, second = await started_by(process, 1), process.pid
    assert second is not None
    await process.stop()
    await until(lambda: not alive(second) and not alive(child))


async def test_process_that_cannot_start_is_reported_with_its_last_output(tmp_path: Path) -> None:
    (tmp_path / "p.log").write_text("an earlier start: all is well\n")
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    process = Process("p", command, os.environ, tmp_path)
    await process.start()
    await until(lambda: process.failed is not None)
    assert "no such model" in str(process.failed)
    assert "an earlier start" not in str(process.failed)
    await process.stop()


# The process's event loop stands still as soon as the file `hang` is there.
HANGING = """
import asyncio, pathlib, sys, time

import pawl.processes

hang = pathlib.Path(__file__).with_name("hang")
plain = asyncio.sleep

async def sleep(delay, result=None):
    if hang.exists():
        hang.unlink()
        time.sleep(600)
    return await plain(delay, result)

if {kind!r} in sys.orig_argv:
    pawl.processes.HUNG_S = 10.0
    asyncio.sleep = sleep
"""


@pytest.mark.parametrize("kind", ["worker", "ingester", "controller"])
async def test_process_with_a_hung_event_loop_ends_itself(tmp_path: Path, kind: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(HANGING.format(kind=kind))
    ports = [f"127.0.0.1:{free_port()}" for _ in range(3)]
    names = ("PAWL_LISTEN", "PAWL_ADMIN_LISTEN", "PAWL_CONTROLLER_LISTEN")
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{tmp_path}:{ROOT}",
        # No database is needed for it.
        "DATABASE_URL": "postgresql://pawl@127.0.0.1:9/pawl",
        "PAWL_SPOOL_DIR": str(tmp_path / "spool"),
    }
    is_child = kind != "controller"
    log = tmp_path / "log"
    with log.open("w") as stderr:
        started = await asyncio.create_subprocess_exec(
            *(str(Path(sys.executable).with_name("pawl")), "proxy" if is_child else kind),
            cwd=tmp_path,
            env=environment | dict(zip(names, ports, strict=True)),
            stderr=stderr,
        )

    def lines(event: str) -> list[dict[str, str]]:
        read = [line for line in log.read_text().splitlines() if line.startswith("{")]
        logged = [json.loads(line) for line in read]
        return [
            line
            for line in logged
            if line["event"] == event and line.get("child", kind).startswith(kind)
        ]

    try:
        await until(lambda: lines("proxy_up" if is_child else "controller_up"))
        (tmp_path / "hang").touch()
        if is_child:
            await until(lambda: len(lines("child_started")) == 2)
            assert [line["status"] for line in lines("child_ended")] == [1]
        else:
            assert await asyncio.wait_for(started.wait(), 30) == 1
        # Where it hung is said.
        assert "sitecustomize.py" in log.read_text().partition("Timeout (0:00:10)!")[2]
    finally:
        if started.returncode is None:
            started.terminate()
            assert await started.wait() == 0
