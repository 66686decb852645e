"""The command's help, large imports, and programs that are run once, whatever they leave behind."""

import asyncio
import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer.main
from typer import Context
from typer.core import TyperGroup

from pawl.cli import app
from pawl.processes import large_imports
from pawl.programs import EndedProgram, TooMuchOutput, run_program
from pawl.rollout.agents import CommandAgent, Request
from store import __version__

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


async def run(*command: str, given: bytes = b"", limit_s: float = 20.0) -> EndedProgram:
    return await asyncio.wait_for(run_program(command, given, limit_s=limit_s, most_bytes=1000), 30)


@pytest.mark.parametrize("given", [b"", b"x" * 2**20], ids=["none", "unread"])
async def test_child_in_another_session_does_not_delay_the_time_limit(
    tmp_path: Path, given: bytes
) -> None:
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


async def test_limit_holds_for_a_program_that_closed_its_output() -> None:
    with pytest.raises(TimeoutError):
        await run("sh", "-c", "exec >&- 2>&-; sleep 60", limit_s=1)


@pytest.mark.parametrize("held", ["2>&1", "2>/dev/null", ">/dev/null"])
async def test_program_ends_with_its_own_status_despite_background_children(held: str) -> None:
    started = time.monotonic()
    ended = await run("sh", "-c", f"sleep 60 {held} & echo done; exit 0")
    assert ended == EndedProgram(status=0, output=b"done\n", errors=b"")
    assert time.monotonic() - started < 30


async def test_program_with_too_much_output_is_ended_at_once() -> None:
    started = time.monotonic()
    with pytest.raises(TooMuchOutput, match="more than 1000 bytes"):
        await run("yes")
    assert time.monotonic() - started < 30


async def test_program_gets_its_whole_input_and_its_whole_output_is_read() -> None:
    given = bytes(range(256)) * 3
    ended = await run("sh", "-c", "cat; echo no idea >&2; exit 3", given=given)
    assert ended == EndedProgram(status=3, output=given, errors=b"no idea\n")


async def test_end_of_a_programs_long_error_output_is_kept() -> None:
    ended = await run("sh", "-c", "seq 100000 >&2")
    assert ended.errors.endswith(b"\n99999\n100000\n")
    assert len(ended.errors) == 2**16


async def test_program_need_not_read_its_input() -> None:
    assert (await run("true", given=b"x" * 2**20)).status == 0


async def test_pawls_settings_are_not_passed_to_programs_of_judges_and_agents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_garbage_collector_pauses_during_large_imports_and_freezes_their_objects() -> None:
    before = gc.get_freeze_count()
    with large_imports():
        assert not gc.isenabled()
        made = [object(), []]
    assert gc.isenabled()
    assert gc.get_freeze_count() > before
    assert not any(one is made for one in gc.get_objects())


def test_garbage_collector_works_again_after_an_import_that_failed() -> None:
    with pytest.raises(ModuleNotFoundError), large_imports():
        import nothing_of_this_name  # noqa: F401
    assert gc.isenabled()


AT_EXIT = """
import atexit, gc
from pawl.processes import large_imports
atexit.register(lambda: print(gc.get_freeze_count()))
with large_imports():
    pass
"""


def test_garbage_collector_has_no_frozen_objects_when_the_process_ends() -> None:
    """Bindings such as triton's report what is never collected as leaked, on standard error."""
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT], capture_output=True, text=True, check=True
    )
    assert done.stdout == "0\n"


def test_version_is_printed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pawl.cli", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"pawl {__version__}\n"


def helps(group: TyperGroup, name: str) -> dict[str, str]:
    """Return the help of a group's commands, by what is typed."""
    texts: dict[str, str] = {}
    context = Context(group)
    for verb in group.list_commands(context):
        command = group.get_command(context, verb)
        assert command is not None
        if isinstance(command, TyperGroup):
            texts |= helps(command, f"{name} {verb}")
        else:
            texts[f"{name} {verb}"] = command.help or ""
    return texts


def test_help_of_a_command_is_wrapped_where_the_terminal_ends() -> None:
    command = typer.main.get_command(app)
    assert isinstance(command, TyperGroup)
    texts = helps(command, "pawl")
    assert {"pawl up", "pawl policies retrain", "pawl keys create"} <= texts.keys()
    assert all(texts.values())
    broken = [name for name, text in texts.items() if "\n" in text.replace("\n\n", "")]
    assert broken == []
