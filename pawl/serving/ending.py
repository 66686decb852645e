"""How a process of the proxy is ended, and for how long it is waited for."""

import asyncio
import signal
from contextlib import suppress
from typing import Final

import structlog

log = structlog.get_logger()

# A worker that is replaced, or whose supervisor was killed, keeps nobody waiting: its calls get
# as long as they may need. `PAWL_STOP_GRACE_S` is for those that somebody waits for.
LEAVE_S: Final = 600.0
# What it needs after that: to break its calls off, and to make their records durable.
LEAVE_MARGIN_S: Final = 10.0

STOP: Final = signal.SIGTERM
LEAVE: Final = signal.SIGHUP


async def end(
    process: asyncio.subprocess.Process, name: str, how: signal.Signals, within_s: float
) -> None:
    """Tell a process to end and wait for it; kill it once it has had its time."""
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
