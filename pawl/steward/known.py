"""Read which versions the store lists as servable, and keep the last reading."""

import asyncio
from typing import Final

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.stack.database import open_engine
from pawl.steward.metrics import STORE_UP
from store.connection.availability import is_unavailable
from store.records import PolicyVersion
from store.settings import StoreSettings
from store.updates.policies import list_servable
from trainer.publishing.servable import is_servable

log = structlog.get_logger()

READ_S: Final = 10.0


class Known:
    """Read the servable versions again and again, and keep the last while the store is away.

    Attributes:
        versions: those versions and each policy's base model; None before the first reading.
    """

    def __init__(self, settings: StoreSettings, poll_s: float) -> None:
        """Store where the database is, and the pause between two readings."""
        self._settings = settings
        self._poll_s = poll_s
        self._up: bool | None = None
        self.versions: list[PolicyVersion] | None = None

    def wants(self, version: PolicyVersion) -> bool:
        """Return whether the version was servable at the last reading."""
        return is_servable(version) and version in (self.versions or ())

    async def follow(self) -> None:
        """Keep `versions` as the store has them; never return."""
        while True:
            try:
                async with open_engine(self._settings) as engine:
                    await self._read_on(engine)
            except Exception as error:
                tell = log.warning if is_unavailable(error) else log.exception
                self._note(False, tell, reason=f"{type(error).__name__}: {error}"[:200])
            await asyncio.sleep(self._poll_s)

    async def _read_on(self, engine: AsyncEngine) -> None:
        while True:
            async with asyncio.timeout(READ_S), engine.connect() as connection:
                self.versions = await list_servable(connection)
            self._note(True, log.info)
            await asyncio.sleep(self._poll_s)

    def _note(self, up: bool, tell: "structlog.typing.WrappedLogger", **more: str) -> None:
        """Show whether the database is read; log it only when that changes."""
        STORE_UP.set(up)
        if up is not self._up:
            tell("steward_reads_database" if up else "steward_waits_for_database", **more)
        self._up = up
