"""The stack's processes: kept up, and gone with all they started."""

import asyncio
import os
import sys
from pathlib import Path

from pawl.stack.process import Process
from tests.support.waiting import eventually

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


async def child_of(process: Process) -> int:
    async def told() -> str:
        told = process.log_file.read_text().split() if process.log_file.exists() else []
        return told[-1] if told else ""

    return int(await eventually(told))


async def gone(pid: int) -> None:
    async def ended() -> bool:
        return not alive(pid)

    await eventually(ended)


async def test_stopping_ends_the_children_too(tmp_path: Path) -> None:
    process = Process("p", [sys.executable, "-c", PARENT], os.environ, tmp_path)
    await process.start()
    child = await child_of(process)
    parent = process.pid
    await process.stop()
    assert parent is not None
    await gone(parent)
    await gone(child)


async def test_a_killed_process_comes_back_and_its_children_do_not_linger(tmp_path: Path) -> None:
    process = Process("p", [sys.executable, "-c", PARENT], os.environ, tmp_path)
    await process.start()
    child, first = await child_of(process), process.pid
    assert first is not None
    os.kill(first, 9)

    async def again() -> bool:
        return process.pid != first and alive(process.pid or 0)

    await eventually(again)
    await gone(child)
    assert process.restarts == 1
    await process.stop()


async def test_one_that_cannot_start_is_given_up_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    process = Process("p", command, os.environ, tmp_path)
    await process.start()

    async def given_up() -> bool:
        return process.failed is not None

    await eventually(given_up)
    assert "no such model" in str(process.failed)
    await process.stop()
    await asyncio.sleep(0)
