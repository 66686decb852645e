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
# An embedded server that is not ready yet is not waited for at a stretch: the keeper may be told
# to stop meanwhile.
LOOK_S: Final = 5.0


class Database:
    """Tells the rest of the keeper nothing but `engine`."""

    def __init__(self, settings: ProxySettings) -> None:
        self._settings = settings
        self._file = PolicyFile(settings.spool_dir)
        self._known: list[PolicyVersion] | None = None
        # Whether the workers have not been told of them yet.
        self._unwritten = False
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
                elif self._embedded is not None and not self.up:
                    # It may have been killed, and nobody else may be there to start it again.
                    await self._url()
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
        if self._embedded is not None:
            await asyncio.to_thread(self._embedded.leave)

    async def _start(self) -> None:
        url = await self._url()
        await upgrade(url)
        self._engine = make_engine(url)

    async def _url(self) -> str:
        if self._settings.database_url is not None:
            return self._settings.database_url.get_secret_value()
        if self._embedded is None:
            self._embedded = EmbeddedPostgres(self._settings.data_dir)
        url = await asyncio.to_thread(self._embedded.ensure_running, within_s=LOOK_S)
        self._tell_workers(url)
        return url

    def _tell_workers(self, url: str) -> None:
        """Write down where the embedded server is; what is spooled is stored in any case.

        A full disk is made free by storing what is on it.
        """
        file = url_file(self._settings.spool_dir)
        try:
            if not file.exists() or file.read_text() != url:
                partial = file.with_suffix(".part")
                # It may hold a password.
                write_private(partial, url.encode())
                partial.replace(file)
        except OSError as error:
            log.error("workers_not_told", what=file.name, reason=str(error))

    async def _watch_once(self) -> None:
        assert self._engine is not None
        async with self._engine.connect() as connection:
            versions = await list_versions(connection)
        if versions != self._known:
            self._known = versions
            self._show(versions)
            self._unwritten = True
        if self._unwritten:
            await self._write(versions)

    async def _write(self, versions: list[PolicyVersion]) -> None:
        try:
            await asyncio.to_thread(self._file.write, versions)
        except OSError as error:
            # The disk is full: the database is there all the same; tried again at each look.
            log.error("workers_not_told", what="policies", reason=str(error))
        else:
            self._unwritten = False

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
