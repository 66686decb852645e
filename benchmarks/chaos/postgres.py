"""Kill PostgreSQL, and start it again."""

import asyncio
import time
from typing import Final

import psutil

from store.embedded import EmbeddedPostgres
from store.errors import StoreError

UP_S: Final = 60.0


async def kill(process: psutil.Process) -> None:
    """Kill it (`kill -9`), and wait until it is reaped: before that it is still listed."""
    process.kill()
    await asyncio.to_thread(psutil.wait_procs, [process], UP_S)


async def start_again(postgres: EmbeddedPostgres) -> None:
    """Start it again; what is left of a killed one may hold its memory for a moment."""
    deadline = time.monotonic() + UP_S
    while True:
        try:
            await asyncio.to_thread(postgres.ensure_running)
        except (StoreError, OSError, RuntimeError, AssertionError):
            # The last is pgserver's word for one that is up and still recovers.
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.2)
        else:
            return


async def kill_and_start(postgres: EmbeddedPostgres) -> None:
    """Kill it and start it again."""
    assert postgres.pid is not None
    await kill(psutil.Process(postgres.pid))
    await start_again(postgres)
