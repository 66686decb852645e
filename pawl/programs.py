"""Run a program once, within limits: bytes in, bytes and a status out, nothing left behind."""

import asyncio
import os
import signal
from asyncio.subprocess import PIPE
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final, cast

from pawl.processes import die_with_parent
from store.records import Record

# Of standard error only the end is kept.
LAST_BYTES: Final = 2**16
# Once a program has ended, what it wrote is there; this is for what is on the way.
REST_S: Final = 1.0


class EndedProgram(Record, frozen=True):
    """Tell how a program ended: its status (negative: a signal's number), and what it wrote."""

    status: int
    output: bytes
    errors: bytes


class TooMuchOutput(Exception):
    """Report that a program wrote more than it may, and was killed."""


async def run_program(
    command: Sequence[str],
    given: bytes,
    *,
    limit_s: float,
    most_bytes: int,
    environment: Mapping[str, str] | None = None,
) -> EndedProgram:
    """Run a program with `given` on standard input; then kill what it left behind.

    `environment` is all that it gets; None: this process's without Pawl's settings.

    Raises:
        OSError: it cannot be started.
        TimeoutError: it had not ended after `limit_s`.
        TooMuchOutput: it wrote more than `most_bytes`.
    """
    transport, run = await asyncio.get_running_loop().subprocess_exec(
        lambda: _Run(most_bytes),
        *command,
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        env=not_ours(os.environ) if environment is None else environment,
        # Ctrl-C must reach the parent alone.
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    try:
        async with asyncio.timeout(limit_s):
            # Nobody need read it; then it is dropped.
            source = cast(asyncio.WriteTransport, transport.get_pipe_transport(0))
            source.write(given)
            source.close()
            await run.over.wait()
        # What it left running may hold its output open: it is not waited for.
        with suppress(TimeoutError):
            async with asyncio.timeout(0 if run.too_much else REST_S):
                await run.closed.wait()
        if run.too_much:
            raise TooMuchOutput(f"it wrote more than {most_bytes} bytes to standard output")
    finally:
        # Its children may outlive it, and hold its output open.
        with suppress(ProcessLookupError):
            os.killpg(transport.get_pid(), signal.SIGKILL)
        # Such a child may have left the group, so the end of its output is not waited for.
        hang_up(transport)
        await run.exited.wait()
        transport.close()
    return EndedProgram(
        status=transport.get_returncode() or 0, output=bytes(run.output), errors=run.errors
    )


class _Run(asyncio.SubprocessProtocol):
    """Collect what a running program writes, and note how far it is.

    `exited` is set once it has ended, whoever holds its output open; `over` likewise, or once it
    wrote `too_much`; `closed` once nobody can write to its output.
    """

    def __init__(self, most_bytes: int) -> None:
        self.errors = b""
        self.too_much = False
        self.exited = asyncio.Event()
        self.over = asyncio.Event()
        self.closed = asyncio.Event()
        self.output = bytearray()
        self._most_bytes = most_bytes
        self._open = {1, 2}

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 2:
            self.errors = (self.errors + data)[-LAST_BYTES:]
        elif len(self.output) + len(data) <= self._most_bytes:
            self.output += data
        else:
            self.too_much = True
            self.over.set()

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._open.discard(fd)
        if not self._open:
            self.closed.set()

    def process_exited(self) -> None:
        self.exited.set()
        self.over.set()


def hang_up(transport: asyncio.SubprocessTransport) -> None:
    """Close this side of a program's pipes, whoever holds the other side open.

    Until they are closed asyncio keeps from those who wait that a program has ended.
    """
    for fd in range(3):
        pipe = transport.get_pipe_transport(fd)
        if isinstance(pipe, asyncio.WriteTransport) and pipe.get_write_buffer_size():
            # To close it would be to wait until all is read.
            pipe.abort()
        elif pipe is not None:
            pipe.close()


def not_ours(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without Pawl's settings: the database is no business of an agent's."""
    return {
        name: value
        for name, value in environment.items()
        if name != "DATABASE_URL" and not name.startswith("PAWL_")
    }


def last_line(errors: bytes | str, most_chars: int = 300) -> str:
    """Return the last line of standard error, at most `most_chars` of it."""
    text = errors.decode(errors="replace") if isinstance(errors, bytes) else errors
    return text.strip().rpartition("\n")[2][-most_chars:]
