"""Connect the ingester to PostgreSQL, migrate it, and watch the policy versions and the API keys.

The versions whose files exist, and the keys, are read twice a second and written to files that
every worker watches. A proxy that starts while the database is away therefore routes as before, and
accepts the same keys.
"""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Final
from uuid import UUID

import structlog
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from proxy.keys import KeyFile
from proxy.metrics import DATABASE_UP, REWARD, REWARD_SUM, SERVING
from proxy.policies.version_file import VersionFile, serving_versions
from proxy.settings import ProxySettings
from store.database import explain_error, is_lasting_refusal, is_unavailable, make_engine
from store.embedded import EmbeddedPostgres
from store.errors import StoreError
from store.grants import KeyRing
from store.keys import key_ring
from store.metrics import begin_at_zero
from store.schema.migrate import upgrade
from store.version_queries import list_events, versions_with_files
from store.versions import PolicyEvent, PolicyVersion

log = structlog.get_logger()

WATCH_S: Final = 0.5
RETRY_S: Final = 1.0
# Longest single wait for an embedded server. Short, so that the ingester can be stopped meanwhile.
EMBEDDED_WAIT_S: Final = 5.0
# So many of the newest changes of policies are searched for changes by hand at one look.
MOST_EVENTS: Final = 200


class KeyPublisher:
    """Keep the workers' file of API keys up to date with the database."""

    def __init__(self, spool_dir: Path) -> None:
        """Store the file's path; the first `update_file` writes it."""
        self._file = KeyFile(spool_dir)
        self._written: KeyRing | None = None

    async def update_file(self, connection: AsyncConnection) -> None:
        """Read the keys from the database, and write the file if the keys or the file changed.

        A disk error is logged and not raised, as it is no error of the database; the next call
        tries again.
        """
        ring = await key_ring(connection)
        if ring == self._written and not self._file.has_changed():
            return
        before = await asyncio.to_thread(self._file.read)
        try:
            await asyncio.to_thread(self._file.write, ring)
        except OSError as error:
            self._written = None
            log.error("keys_file_not_written", reason=str(error))
            return
        self._file.has_changed()
        self._written = ring
        log.info("keys", made=ring.made, standing=len(ring.grants), **_changed_keys(before, ring))


def _changed_keys(before: KeyRing | None, ring: KeyRing) -> dict[str, list[str]]:
    """Return the names of keys added and revoked since `before`; {} if `before` is unknown."""
    if before is None or not before.seen:
        return {}
    old, new = ({grant.id: grant.name for grant in one.grants} for one in (before, ring))
    return {
        "added": [name for key, name in new.items() if key not in old],
        "revoked": [name for key, name in old.items() if key not in new],
    }


async def _newest_events(connection: AsyncConnection, most: int) -> dict[UUID, PolicyEvent]:
    return {event.id: event for event in await list_events(connection, None, most=most)}


class Database:
    """Connect to PostgreSQL, migrate it, and keep the workers' policy file up to date."""

    def __init__(self, settings: ProxySettings) -> None:
        """Read the policy versions last written to the spool directory; `run` connects."""
        self._settings = settings
        self._file = VersionFile(settings.spool_dir)
        self._keys = KeyPublisher(settings.spool_dir)
        self._known: list[PolicyVersion] | None = None
        # Whether the policy file does not hold `_known` yet.
        self._unwritten = False
        # Ids of the newest changes of policies at the last look; None before the first look.
        self._events: set[UUID] | None = None
        self._embedded: EmbeddedPostgres | None = None
        self._engine: AsyncEngine | None = None
        self._stopping = asyncio.Event()
        # `up` and `refusal` as they were last logged.
        self._logged: tuple[bool, str] | None = None
        self.up = False
        # The class of the last error if it will not pass by itself, else empty.
        self.refusal = ""
        self.versions: list[PolicyVersion] = []
        self.serving: dict[str, int] = {}
        self._set_metrics(self._file.read() or [])

    def engine_if_connected(self) -> AsyncEngine | None:
        """Return the engine, or None before the first connection; the database may be away now."""
        return self._engine

    async def run(self) -> None:
        """Connect, and watch the policy versions until `stop_watching` is called."""
        while not self._stopping.is_set():
            pause = WATCH_S
            try:
                if self._engine is None:
                    await self._start()
                elif self._embedded is not None and not self.up:
                    # The embedded server may have been killed: start it again if needed.
                    await self._url()
                await self._watch_once()
                self.refusal = ""
                self._set_database_up(True)
            except Exception as error:
                # This task must outlive every failure of the database; serving goes on without it.
                self.refusal = _type_if_lasting(error)
                self._set_database_up(False, f"{type(error).__name__}: {explain_error(error)}")
                pause = RETRY_S
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)

    def stop_watching(self) -> None:
        """Make `run` return after its present look at the database."""
        self._stopping.set()

    async def close(self) -> None:
        """Close the connections, and stop an embedded server that this ingester started."""
        if self._engine is not None:
            await self._engine.dispose()
        if self._embedded is not None:
            await asyncio.to_thread(self._embedded.stop)

    async def _start(self) -> None:
        url = await self._url()
        await upgrade(url)
        self._engine = make_engine(url)

    async def _url(self) -> str:
        if self._settings.database_url is not None:
            return self._settings.database_url.get_secret_value()
        if self._embedded is None:
            self._embedded = EmbeddedPostgres(self._settings.data_dir)
        return await asyncio.to_thread(self._embedded.ensure_running, within_s=EMBEDDED_WAIT_S)

    async def _watch_once(self) -> None:
        assert self._engine is not None
        async with self._engine.connect() as connection:
            versions = await versions_with_files(connection)
            await self._keys.update_file(connection)
            await self._log_manual_changes(connection)
        if versions != self._known:
            self._known = versions
            self._set_metrics(versions)
            self._unwritten = True
        if self._unwritten or not self._file.exists():
            await self._write(versions)

    async def _log_manual_changes(self, connection: AsyncConnection) -> None:
        """Log the changes of policies that operators made since the last look."""
        seen = self._events
        if seen is not None and seen.issuperset(await _newest_events(connection, 1)):
            return
        newest = await _newest_events(connection, MOST_EVENTS)
        self._events = set(newest)
        for event in reversed(newest.values()):
            if seen is not None and event.id not in seen and event.actor == "operator":
                log.info(
                    "changed_by_hand",
                    policy=event.name,
                    version=event.version,
                    from_state=event.from_state,
                    to_state=event.to_state,
                    reason=event.reason,
                )

    async def _write(self, versions: list[PolicyVersion]) -> None:
        try:
            await asyncio.to_thread(self._file.write, versions)
        except OSError as error:
            # A full disk must not count as a lost database. It is tried again at each look.
            log.error("policies_file_not_written", reason=str(error))
        else:
            self._unwritten = False

    def _set_metrics(self, versions: list[PolicyVersion]) -> None:
        self.versions = versions
        self.serving = serving_versions(versions)
        for policy, version in self.serving.items():
            SERVING.labels(policy).set(version)
        for one in versions:
            if one.is_servable:
                earner = [[one.name], [str(one.version)]]
                begin_at_zero({REWARD: earner, REWARD_SUM: earner})
        log.info("policies", serving=self.serving)

    def _set_database_up(self, up: bool, reason: str = "") -> None:
        if (up, self.refusal) != self._logged:
            (log.error if self.refusal else log.info)("database", up=up, reason=reason)
        self._logged = up, self.refusal
        self.up = up
        DATABASE_UP.set(up)


def _type_if_lasting(error: Exception) -> str:
    """Return the error's class if somebody must fix its cause; "" if it passes by itself."""
    # An embedded server that does not start, or not yet, is a StoreError.
    away = isinstance(error, StoreError) or is_unavailable(error)
    return type(error).__name__ if is_lasting_refusal(error) or not away else ""
