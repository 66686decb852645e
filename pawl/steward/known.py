"""Read which versions the store lists as servable, and keep the last reading.

A reading does not keep for ever: the trainer, which may reach the database when the steward does
not, deletes the files of a version a while after it was retired.
"""

import asyncio
from typing import Final

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.stack.database import open_engine
from pawl.steward.metrics import ALTERED, MISSERVED, STORE_UP
from store.connection.availability import is_unavailable
from store.settings import StoreSettings
from store.version_queries import list_servable
from store.versions import PolicyVersion
from trainer.errors import FilesAltered, FilesUnread
from trainer.publishing.altered import check_files
from trainer.publishing.cleaning import LEAST_IDLE_S
from trainer.publishing.servable import is_servable
from trainer.publishing.server import LIST_S, TIMEOUT_S

log = structlog.get_logger()

READ_S: Final = 10.0
# A load that begins by a reading of this age ends before the files of what was retired just after
# that reading can be deleted.
OLDEST_S: Final = LEAST_IDLE_S - TIMEOUT_S - LIST_S


class Known:
    """Read the servable versions again and again, and keep the last while the store is away.

    Attributes:
        versions: those versions and each policy's base model; None before the first reading.
        altered: why, by its name, for each of them whose files are not those that were written.
        unread: why, by its name, for each of them whose files could not be read last time.
        misserved: why, by the replica and its name, for each that is not served as it was trained.
    """

    def __init__(self, settings: StoreSettings, poll_s: float) -> None:
        """Store where the database is, and the pause between two readings."""
        self._settings = settings
        self._poll_s = poll_s
        self._up: bool | None = None
        self._read_at = 0.0
        self.versions: list[PolicyVersion] | None = None
        self.altered: dict[str, str] = {}
        self.unread: dict[str, str] = {}
        self.misserved: dict[str, dict[str, str]] = {}

    def wants(self, version: PolicyVersion) -> bool:
        """Return whether the version was servable at the last reading."""
        return is_servable(version) and version in (self.versions or ())

    def may_load(self, version: PolicyVersion) -> bool:
        """Return whether the last reading is young enough for the version to have its files yet.

        That which had the traffic must first lose it, and be idle, before it is retired.
        """
        age_s = asyncio.get_running_loop().time() - self._read_at
        return version.state == "serving" or age_s <= OLDEST_S

    @property
    def up(self) -> bool:
        """Return whether the database was there at the last try to read it."""
        return bool(self._up)

    async def check(self, version: PolicyVersion) -> None:
        """Check the files of a version, and note for all to see what is wrong with them.

        Raises:
            FilesAltered: they are not those that were written.
            FilesUnread: they cannot be read for now, and may be as they were written.
        """
        name = version.served_name
        try:
            await check_files(version)
        except FilesAltered as error:
            self.unread.pop(name, None)
            self.altered[name] = str(error)
            ALTERED.labels(name).set(1)
            raise
        except FilesUnread as error:
            # If they were altered, nobody has seen since that they are not.
            self.unread[name] = str(error)
            raise
        self._forget(name)

    def troubled(self, version: PolicyVersion) -> bool:
        """Return whether something was wrong with the version's files when last looked at."""
        return version.served_name in self.altered or version.served_name in self.unread

    def note_served(self, replica: str, name: str, why_not: str | None) -> None:
        """Note that a replica serves a version as it was trained, or why it does not."""
        if why_not is not None:
            self.misserved.setdefault(replica, {})[name] = why_not
            MISSERVED.labels(replica, name).set(1)
        elif self.misserved.get(replica, {}).pop(name, None) is not None:
            MISSERVED.remove(replica, name)
            if not self.misserved[replica]:
                del self.misserved[replica]

    def forget_replica(self, replica: str) -> None:
        """Forget what a replica served wrongly: it is away, and may be another one when back."""
        for name in list(self.misserved.get(replica, ())):
            self.note_served(replica, name, None)

    def _forget(self, name: str) -> None:
        self.unread.pop(name, None)
        if self.altered.pop(name, None) is not None:
            ALTERED.remove(name)

    def _forget_unservable(self) -> None:
        """Forget what was noted of versions that are not servable any more."""
        servable = {one.served_name for one in self.versions or () if is_servable(one)}
        for name in (self.altered.keys() | self.unread.keys()) - servable:
            self._forget(name)
        for replica, names in list(self.misserved.items()):
            for name in names.keys() - servable:
                self.note_served(replica, name, None)

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
            read_at = asyncio.get_running_loop().time()
            async with asyncio.timeout(READ_S), engine.connect() as connection:
                self.versions = await list_servable(connection)
            self._read_at = read_at
            self._forget_unservable()
            self._note(True, log.info)
            await asyncio.sleep(self._poll_s)

    def _note(self, up: bool, tell: "structlog.typing.WrappedLogger", **more: str) -> None:
        """Show whether the database is read; log it only when that changes."""
        STORE_UP.set(up)
        if up is not self._up:
            tell("steward_reads_database" if up else "steward_waits_for_database", **more)
        self._up = up
