"""Read which versions the store lists as servable, and since when a reader knows them."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Final

import asyncpg

from benchmarks.chaos.trainer.database import Database
from store.versions import SERVABLE

_SERVABLE: Final = """
    SELECT served_name, adapter_path FROM policies
    WHERE name = ANY($1) AND version > 0 AND state = ANY($2)
"""


class Servable:
    """Read a run's servable versions; none is ever retired in a run."""

    def __init__(self, database: Database, url: str, policies: Sequence[str]) -> None:
        self._database, self._url, self._policies = database, url, list(policies)
        self._since: dict[str, float] = {}

    def now(self) -> Mapping[str, str]:
        """Return the folder of each, by the name that it is served under."""
        with self._database.up():
            found = asyncio.run(self._read())
        for name in found:
            self._since.setdefault(name, time.monotonic())
        return found

    def older_than(self, seconds: float) -> list[str]:
        """Return the names of those that have been read that long ago."""
        until = time.monotonic() - seconds
        return [name for name, since in list(self._since.items()) if since <= until]

    async def _read(self) -> dict[str, str]:
        connection = await asyncpg.connect(self._url)
        try:
            rows = await connection.fetch(_SERVABLE, self._policies, list(SERVABLE))
        finally:
            await connection.close()
        return dict(map(tuple, rows))
