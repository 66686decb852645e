"""Programs that are run once: whatever they leave behind, their end is noticed."""

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from pawl.programs import Ended, TooMuchOutput, run_program
from pawl.rollout.agents import CommandAgent, Request

# Begins a session of its own, and holds on to what it inherited.
DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    open(sys.argv[1], "w").write(str(os.getpid()))
    time.sleep(60)
    os._exit(0)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""


LOOK = ("sh", "-c", "env | grep -e MY_KEY -e DATABASE_URL -e PAWL_")


async def run(*command: str, given: bytes = b"", limit_s: float = 20.0) -> Ended:
    return await asyncio.wait_for(run_program(command, given, limit_s=limit_s, most_bytes=1000), 30)


@pytest.mark.parametrize("given", [b"", b"x" * 2**20], ids=["none", "unread"])
async def test_a_child_in_another_session_holds_nobody_up(tmp_path: Path, given: bytes) -> None:
    """It holds standard output, standard error, and unread standard input."""
    note = tmp_path / "pid"
    program = DAEMON + "time.sleep(60)"
    started = time.monotonic()
    try:
        with pytest.raises(TimeoutError):
            await run(sys.executable, "-c", program, str(note), given=given, limit_s=2)
        assert time.monotonic() - started < 30
    finally:
        os.kill(int(note.read_text()), 9)


async def test_a_limit_holds_for_what_has_closed_its_output() -> None:
    with pytest.raises(TimeoutError):
        await run("sh", "-c", "exec >&- 2>&-; sleep 60", limit_s=1)


@pytest.mark.parametrize("held", ["2>&1", "2>/dev/null", ">/dev/null"])
async def test_it_ends_with_its_own_status_whatever_it_leaves_running(held: str) -> None:
    started = time.monotonic()
    ended = await run("sh", "-c", f"sleep 60 {held} & echo done; exit 0")
    assert ended == Ended(status=0, output=b"done\n", errors=b"")
    assert time.monotonic() - started < 30


async def test_what_floods_is_ended_at_once() -> None:
    started = time.monotonic()
    with pytest.raises(TooMuchOutput, match="more than 1000 bytes"):
        await run("yes")
    assert time.monotonic() - started < 30


async def test_what_it_reads_and_writes_is_whole() -> None:
    given = bytes(range(256)) * 3
    ended = await run("sh", "-c", "cat; echo no idea >&2; exit 3", given=given)
    assert ended == Ended(status=3, output=given, errors=b"no idea\n")


async def test_of_a_flood_of_errors_the_end_is_kept() -> None:
    ended = await run("sh", "-c", "seq 100000 >&2")
    assert ended.errors.endswith(b"\n99999\n100000\n")
    assert len(ended.errors) == 2**16


async def test_it_need_not_read_what_it_is_given() -> None:
    assert (await run("true", given=b"x" * 2**20)).status == 0


async def test_pawls_settings_are_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither to a judge, which gets no environment of its own, nor to an agent."""
    for name in ("DATABASE_URL", "PAWL_DATA_DIR", "MY_KEY"):
        monkeypatch.setenv(name, "secret")
    request = Request(task={}, environment={}, limit_s=20)
    for said in (
        (await run(*LOOK)).output.decode(),
        (await CommandAgent(LOOK).run(request)).output,
    ):
        assert "MY_KEY=secret" in said
        assert "DATABASE_URL" not in said
        assert "PAWL_" not in said


async def test_a_program_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError):
        await run("no-such-program")
