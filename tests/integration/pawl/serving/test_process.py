"""The stack's processes: kept up, and gone with all they started."""

import os
import sys
from pathlib import Path

from pawl.stack.process import Process
from tests.support.waiting import eventually, until

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


async def test_processes_are_kept_up_and_end_with_their_children(tmp_path: Path) -> None:
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


async def test_process_that_cannot_start_is_given_up_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    process = Process("p", command, os.environ, tmp_path)
    await process.start()
    await until(lambda: process.failed is not None)
    assert "no such model" in str(process.failed)
    await process.stop()
