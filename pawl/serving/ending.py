"""End a process of the proxy: by which signal, and how long it may take."""

import asyncio
import os
import signal
from contextlib import suppress
from typing import Final

import structlog

log = structlog.get_logger()

# How long a worker that is replaced, or whose supervisor was killed, may go on with its calls.
# Nobody waits for its end, so this is long; if somebody does, `PAWL_STOP_GRACE_S` holds.
LEAVE_S: Final = 600.0
# How long it may take after that, to break its calls off and to make their records durable.
LEAVE_MARGIN_S: Final = 10.0

# Status of a process that a disk keeps from starting: it may well start later (sysexits.h).
DISK_FAILS: Final = os.EX_TEMPFAIL

STOP: Final = signal.SIGTERM
LEAVE: Final = signal.SIGHUP


async def end(
    process: asyncio.subprocess.Process, name: str, how: signal.Signals, within_s: float
) -> None:
    """Send a process the signal `how` and wait for its end; kill it after `within_s` seconds."""
    with suppress(ProcessLookupError):
        process.send_signal(how)
    try:
        async with asyncio.timeout(within_s):
            await process.wait()
    except TimeoutError:
        log.error("child_killed", child=name, pid=process.pid, reason="it did not end in time")
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
