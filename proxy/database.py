"""The proxy's view of PostgreSQL: a connection when there is one, never a wait for it.

Also watches the policies: who serves is read twice a second, and kept in a file, so that a
proxy that starts while the database is away routes as the last one did.
"""

import asyncio
from contextlib import suppress
from typing import Final

import msgspec
import structlog
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from proxy.metrics import DATABASE_UP, SERVING
from proxy.settings import ProxySettings
from proxy.upstream import Upstream
from proxy.versions import MAX_PINS, Versions
from store.embedded import EmbeddedPostgres
from store.engine import make_engine
from store.migrate import upgrade
from store.policies import list_versions, pinned_episodes
from store.records import PolicyVersion

log = structlog.get_logger()

WATCH_S: Final = 0.5
RETRY_S: Final = 1.0
SNAPSHOT: Final = "policies.json"


class Database:
    """Connects, migrates, watches; tells the rest of the proxy nothing but `engine`."""

    def __init__(self, settings: ProxySettings, versions: Versions, upstream: Upstream) -> None:
        self._settings = settings
        self._versions = versions
        self._upstream = upstream
        self._snapshot = settings.spool_dir / SNAPSHOT
        self._known: list[PolicyVersion] = []
        self._embedded: EmbeddedPostgres | None = None
        self._engine: AsyncEngine | None = None
        self._stopping = asyncio.Event()
        self.up = False
        self._restore()

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
        async with self._engine.connect() as connection:
            await self._load_pins(connection)

    async def _url(self) -> str:
        if self._settings.database_url is not None:
            return self._settings.database_url.get_secret_value()
        if self._embedded is None:
            self._embedded = EmbeddedPostgres(self._settings.data_dir)
        return await asyncio.to_thread(self._embedded.ensure_running)

    async def _load_pins(self, connection: AsyncConnection) -> None:
        """Episodes that are under way keep their version across a restart of the proxy."""
        for policy, episode, version in await pinned_episodes(connection, MAX_PINS):
            self._versions.pin(policy, episode, version)

    async def _watch_once(self) -> None:
        assert self._engine is not None
        async with self._engine.connect() as connection:
            versions = await list_versions(connection)
        if versions != self._known:
            self._take(versions)
            await asyncio.to_thread(self._keep, versions)

    def _take(self, versions: list[PolicyVersion]) -> None:
        self._known = versions
        self._versions.replace(versions)
        self._upstream.learn(version.served_name for version in versions if version.version)
        for policy, version in self._versions.serving.items():
            SERVING.labels(policy).set(version)
        log.info("policies", serving=self._versions.serving)

    def _keep(self, versions: list[PolicyVersion]) -> None:
        partial = self._snapshot.with_suffix(".part")
        partial.write_bytes(msgspec.json.encode(versions))
        partial.replace(self._snapshot)

    def _restore(self) -> None:
        if self._snapshot.exists():
            self._take(msgspec.json.decode(self._snapshot.read_bytes(), type=list[PolicyVersion]))

    @property
    def serving(self) -> dict[str, int]:
        """The version that new episodes of each policy get."""
        return self._versions.serving

    def _set_up(self, up: bool, reason: str = "") -> None:
        if up != self.up:
            log.info("database", up=up, reason=reason)
        self.up = up
        DATABASE_UP.set(up)
