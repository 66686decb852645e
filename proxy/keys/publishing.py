"""Bring the keys from the database to the file that those who check them watch."""

import asyncio
from pathlib import Path

import structlog
from sqlalchemy.ext.asyncio import AsyncConnection

from proxy.keys.key_file import KeyFile
from store.keys.keys import KeyRing, key_ring

log = structlog.get_logger()


class KeyPublisher:
    """Keep the file of keys up to date; only the keeper does so."""

    def __init__(self, spool_dir: Path) -> None:
        """Place the file below `spool_dir`; the first look writes it, whatever it holds."""
        self._file = KeyFile(spool_dir)
        self._written: KeyRing | None = None

    async def bring(self, connection: AsyncConnection) -> None:
        """Read the keys, and write the file if they changed.

        A disk that refuses is logged, and tried again at the next look: that must not count as a
        lost database.
        """
        ring = await key_ring(connection)
        # Also where somebody deleted or replaced the file.
        if ring == self._written and not self._file.changed():
            return
        try:
            await asyncio.to_thread(self._file.write, ring)
        except OSError as error:
            self._written = None
            log.error("workers_not_told", what="keys", reason=str(error))
            return
        self._file.changed()
        self._written = ring
        log.info("keys", made=ring.made, standing=len(ring.grants))
