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

# Bytes kept of standard error: its end.
LAST_BYTES: Final = 2**16
# How long to wait, after a program's end, for output that is still in its pipes.
DRAIN_S: Final = 1.0


class EndedProgram(Record, frozen=True):
    """A program's exit status (if negative, of a signal), standard output and standard error."""

    status: int
    output: bytes
    errors: bytes


class TooMuchOutput(Exception):
    """A program wrote more than it may, and was killed."""


async def run_program(
    command: Sequence[str],
    given: bytes,
    *,
    limit_s: float,
    most_bytes: int,
    environment: Mapping[str, str] | None = None,
) -> EndedProgram:
    """Run a program with `given` on standard input; in the end kill its group, also at an error.

    `environment` is the program's whole environment; None: this process's without Pawl's settings.

    Raises:
        OSError: the program cannot be started.
        TimeoutError: it did not end within `limit_s` seconds.
        TooMuchOutput: it wrote more than `most_bytes` to standard output.
    """
    transport, run = await asyncio.get_running_loop().subprocess_exec(
        lambda: _Run(most_bytes),
        *command,
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        env=without_pawl_settings(os.environ) if environment is None else environment,
        # Ctrl-C must reach only the parent.
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    try:
        async with asyncio.timeout(limit_s):
            # The program need not read its input.
            source = cast(asyncio.WriteTransport, transport.get_pipe_transport(0))
            source.write(given)
            source.close()
            await run.over.wait()
        # Wait no longer: processes that the program started may hold its output open.
        with suppress(TimeoutError):
            async with asyncio.timeout(0 if run.too_much else DRAIN_S):
                await run.closed.wait()
        if run.too_much:
            raise TooMuchOutput(f"it wrote more than {most_bytes} bytes to standard output")
    finally:
        # Children may outlive the program, and hold its output open.
        with suppress(ProcessLookupError):
            os.killpg(transport.get_pid(), signal.SIGKILL)
        # A child may have left the group and survive, so do not wait for the end of the output.
        close_pipes(transport)
        await run.exited.wait()
        transport.close()
    return EndedProgram(
        status=transport.get_returncode() or 0, output=bytes(run.output), errors=run.errors
    )


class _Run(asyncio.SubprocessProtocol):
    """Collects the output of a running program, and tracks its end.

    `exited` is set once the program ends, even if its output is still open; `over` is set once it
    ends or wrote `too_much`; `closed` is set once no process can write to its output.
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


def close_pipes(transport: asyncio.SubprocessTransport) -> None:
    """Close this side of a program's pipes, even if the other side is open.

    asyncio reports the end of a program to waiters only once its pipes are closed.
    """
    for fd in range(3):
        pipe = transport.get_pipe_transport(fd)
        if isinstance(pipe, asyncio.WriteTransport) and pipe.get_write_buffer_size():
            # `close` would wait until everything is read.
            pipe.abort()
        elif pipe is not None:
            pipe.close()


def without_pawl_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without Pawl's settings: agents must not see the database's URL."""
    return {
        name: value
        for name, value in environment.items()
        if name != "DATABASE_URL" and not name.startswith("PAWL_")
    }


def last_line(errors: bytes | str, most_chars: int = 300) -> str:
    """Return the last `most_chars` characters of the last line of standard error."""
    text = errors.decode(errors="replace") if isinstance(errors, bytes) else errors
    return text.strip().rpartition("\n")[2][-most_chars:]
