"""Count how many calls Pawl has stored, and how long it takes until all are."""

import asyncio
import time

import asyncpg

POLL_S = 0.25
TIMEOUT_S = 600.0


class NotStored(Exception):
    """Report that answered calls are not in PostgreSQL after ten minutes."""


class Ledger:
    """Count the rows of `transitions`."""

    def __init__(self, url: str) -> None:
        self._url = url

    def stored(self) -> int:
        """Return the number of calls stored now."""
        return asyncio.run(self._count())

    def settled(self, wanted: int) -> tuple[int, float]:
        """Wait for so many calls, and for what else was under way.

        Returns:
            How many there are, and after how many seconds the wanted ones were.
        Raises:
            NotStored: see there.
        """
        return asyncio.run(self._settled(wanted))

    async def _settled(self, wanted: int) -> tuple[int, float]:
        began = time.monotonic()
        drained: float | None = None
        before = -1
        while True:
            count = await self._count()
            waited = time.monotonic() - began
            if count >= wanted and drained is None:
                drained = waited
            if drained is not None and count == before:
                return count, drained
            if waited > TIMEOUT_S:
                raise NotStored(f"{count} of {wanted} calls are stored after {waited:.0f} s")
            before = count
            await asyncio.sleep(POLL_S if drained is None else 4 * POLL_S)

    async def _count(self) -> int:
        connection = await asyncpg.connect(self._url)
        try:
            return int(await connection.fetchval("SELECT count(*) FROM transitions"))
        finally:
            await connection.close()
