"""Delete idempotency keys that are a day old, on this machine and in the database."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.feedback.idempotency import KeyFiles
from store.connection.availability import is_unavailable
from store.write.feedback_keys import forget_keys

log = structlog.get_logger()

CLEAN_S: Final = 600.0


async def clean_keys(spool_dir: Path, connect: Callable[[], AsyncEngine | None]) -> None:
    """Delete old keys every `CLEAN_S` seconds, until cancelled."""
    files = KeyFiles(spool_dir)
    while True:
        await asyncio.sleep(CLEAN_S)
        try:
            forgotten = await asyncio.to_thread(files.clean)
            engine = connect()
            if engine is not None:
                async with engine.connect() as connection:
                    forgotten += await forget_keys(connection)
            log.info("idempotency_keys_forgotten", keys=forgotten)
        except Exception as error:
            # This task must not end: old keys are looked for again in any case.
            note = log.warning if is_unavailable(error) else log.exception
            note("idempotency_keys_kept", reason=type(error).__name__)
