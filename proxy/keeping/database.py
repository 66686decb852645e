"""The keeper's view of PostgreSQL: connects, migrates, and watches who serves.

Who serves is read twice a second and kept in a file that every worker watches, so that a
proxy that starts while the database is away routes as the last one did.
"""

import asyncio
from contextlib import suppress
from typing import Final

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.lookup import url_file
from proxy.metrics import DATABASE_UP, SERVING
from proxy.policies import PolicyFile, serving_of
from proxy.settings import ProxySettings
from store.embedded import EmbeddedPostgres
from store.engine import make_engine
from store.files import write_private
from store.migrate import upgrade
from store.policies import list_versions
from store.records import PolicyVersion

log = structlog.get_logger()

WATCH_S: Final = 0.5
RETRY_S: Final = 1.0


class Database:
    """Tells the rest of the keeper nothing but `engine`."""

    def __init__(self, settings: ProxySettings) -> None:
        self._settings = settings
        self._file = PolicyFile(settings.spool_dir)
        self._known: list[PolicyVersion] | None = None
        self._embedded: EmbeddedPostgres | None = None
        self._engine: AsyncEngine | None = None
        self._stopping = asyncio.Event()
        self.up = False
        self.serving: dict[str, int] = {}
        self._show(self._file.read() or [])

    def engine(self) -> AsyncEngine | None:
        """The engine once a connection was made; it may have broken since."""
        return self._engine

    async def run(self) -> None:
        """Watch until `stop`."""
        while not self._stopping.is_set():
            pause = WATCH_S
            try:
                if self._engine is None:
                    await self._start()
                await self._watch_once()
                self._set_up(True)
            except Exception as error:
                # This task must outlive whatever the database does: serving goes on without.
                self._set_up(False, f"{type(error).__name__}: {error}"[:200])
                pause = RETRY_S
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)

    def stop(self) -> None:
        """Return from `run` after the present look."""
        self._stopping.set()

    async def close(self) -> None:
        """Give the connections back; the embedded server runs on for the other processes."""
        if self._engine is not None:
            await self._engine.dispose()

    async def _start(self) -> None:
        url = await self._url()
        await upgrade(url)
        self._engine = make_engine(url)

    async def _url(self) -> str:
        if self._settings.database_url is not None:
            return self._settings.database_url.get_secret_value()
        if self._embedded is None:
            self._embedded = EmbeddedPostgres(self._settings.data_dir)
        url = await asyncio.to_thread(self._embedded.ensure_running)
        try:
            # It may hold a password.
            write_private(url_file(self._settings.spool_dir), url.encode())
        except OSError as error:
            # The workers do without; what is spooled must be stored all the more on a full disk.
            log.error("database_url_not_told", reason=str(error))
        return url

    async def _watch_once(self) -> None:
        assert self._engine is not None
        async with self._engine.connect() as connection:
            versions = await list_versions(connection)
        if versions != self._known:
            self._show(versions)
            try:
                await asyncio.to_thread(self._file.write, versions)
            except OSError as error:
                # It is the disk that fails, not the database; the next look tries again.
                log.error("policies_not_told", reason=str(error))
            else:
                self._known = versions

    def _show(self, versions: list[PolicyVersion]) -> None:
        self.serving = serving_of(versions)
        for policy, version in self.serving.items():
            SERVING.labels(policy).set(version)
        log.info("policies", serving=self.serving)

    def _set_up(self, up: bool, reason: str = "") -> None:
        if up != self.up:
            log.info("database", up=up, reason=reason)
        self.up = up
        DATABASE_UP.set(up)
