"""Runs a program once, within limits: bytes in, bytes and a status out, nothing left behind."""

import asyncio
import ctypes
import os
import signal
from asyncio.subprocess import PIPE
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from store.records import Record

PR_SET_PDEATHSIG: Final = 1
READ_BYTES: Final = 2**16
# Of standard error only the end is kept.
LAST_BYTES: Final = 2**16


class Ended(Record, frozen=True):
    """How a program ended: its status (negative: a signal's number), and what it wrote."""

    status: int
    output: bytes
    errors: bytes


class TooMuchOutput(Exception):
    """A program wrote more than it may; it was killed."""


async def run_program(
    command: Sequence[str],
    given: bytes,
    *,
    limit_s: float,
    most_bytes: int,
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Run a program with bytes on standard input; then kill what it left behind.

    Args:
        command: the program and its arguments.
        given: all of its standard input.
        limit_s: seconds until it is killed.
        most_bytes: how much it may write to standard output.
        environment: all of its environment; None: this process's.

    Raises:
        OSError: it cannot be started.
        TimeoutError: it had not ended after `limit_s`.
        TooMuchOutput: it wrote more than `most_bytes`.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        env=environment,
        # Ctrl-C must reach the parent alone.
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    try:
        async with asyncio.timeout(limit_s), asyncio.TaskGroup() as tasks:
            tasks.create_task(_write(process, given))
            output = tasks.create_task(_read(process.stdout, most_bytes))
            errors = tasks.create_task(_read_end(process.stderr))
            status = await process.wait()
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    finally:
        # Kill the group: children of the program may outlive it and hold its output open.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    return Ended(status=status, output=output.result(), errors=errors.result())


async def _write(process: asyncio.subprocess.Process, given: bytes) -> None:
    assert process.stdin is not None
    # A program need not read what it is given.
    with suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(given)
        await process.stdin.drain()
    process.stdin.close()


async def _read(source: asyncio.StreamReader | None, most_bytes: int) -> bytes:
    assert source is not None
    parts: list[bytes] = []
    size = 0
    while part := await source.read(READ_BYTES):
        parts.append(part)
        size += len(part)
        if size > most_bytes:
            raise TooMuchOutput(f"it wrote more than {most_bytes} bytes to standard output")
    return b"".join(parts)


async def _read_end(source: asyncio.StreamReader | None) -> bytes:
    assert source is not None
    kept = b""
    while part := await source.read(READ_BYTES):
        kept = (kept + part)[-LAST_BYTES:]
    return kept


def die_with_parent() -> None:
    """Have the kernel send this child SIGTERM when its parent ends, however it ends.

    Linux only: `PR_SET_PDEATHSIG`, see prctl(2).
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def last_line(errors: bytes | str, most_chars: int = 300) -> str:
    """Return the last line of standard error, at most `most_chars` of it."""
    text = errors.decode(errors="replace") if isinstance(errors, bytes) else errors
    return text.strip().rpartition("\n")[2][-most_chars:]
