"""Keep each replica of the model server reconciled with what the store lists as servable.

Each replica is looked at on its own, so that one that is away or slow delays no other. While the
database is away the last reading stands, but not for ever: the trainer, which may still reach the
database, deletes the files of a version a while after it was unloaded.
"""

import asyncio
from collections.abc import Iterable
from typing import Final

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.controller.metrics import ALTERED, LOADS, MISSERVED, MISSING, REPLICA_UP, STORE_UP
from pawl.controller.reconciler import OUTCOMES, Reconciler
from store.adapter_slots import unload_ended
from store.metrics import begin_at_zero
from store.version_queries import list_servable, unserved_versions
from store.version_states import mark_unloaded
from store.versions import PolicyVersion
from trainer.errors import FilesAltered, FilesUnread, Misserved, NotFetched, UpstreamAway
from trainer.publishing.cleaning import IDLE_S
from trainer.publishing.model_server import LIST_S, TIMEOUT_S, ModelServer

log = structlog.get_logger()

READ_S: Final = 10.0
# All proxies know of a change after this long; they read the policies twice a second.
PROXY_REFRESH_S: Final = 10.0
# A load that begins by a reading of this age ends before the files of a version that was unloaded
# just after that reading can be deleted.
OLDEST_S: Final = IDLE_S - TIMEOUT_S - LIST_S


class ServableVersions:
    """Read the servable versions again and again, and keep the last reading.

    Attributes:
        versions: those versions and each policy's base model; None before the first reading.
        up: whether the database was there at the last try to read it.
        reconcilers: those of all replicas.
    """

    def __init__(self) -> None:
        """Begin without a reading."""
        self._engine: AsyncEngine | None = None
        self._read_at = 0.0
        self.versions: list[PolicyVersion] | None = None
        self.up = False
        self.reconcilers: list[Reconciler] = []

    def may_load(self, version: PolicyVersion) -> bool:
        """Return whether a version is still servable, and the reading young enough to load it.

        A version that had the traffic must first lose it, and be idle, before it is unloaded.
        """
        if version not in (self.versions or ()):
            return False
        age_s = asyncio.get_running_loop().time() - self._read_at
        return version.state == "serving" or age_s <= OLDEST_S

    async def unserved(self) -> list[PolicyVersion]:
        """Return the versions that no server should have, once all proxies know; none if unread."""
        if self._engine is None or not self.up:
            return []
        async with self._engine.connect() as connection:
            return [
                version
                for name in sorted({one.name for one in self.versions or ()})
                for version in await unserved_versions(connection, name, PROXY_REFRESH_S)
            ]

    async def look(self, engine: AsyncEngine) -> None:
        """Read `versions` as the store has them, and unload those that no replica can load.

        An episode goes on with what serves then; and no new one gets a control that is lost. But
        where what serves is in trouble too, the server is at fault, or the disk with the files.
        After a start of a replica or of the controller, what no episode is under way with is not
        loaded again.
        """
        read_at, is_up = asyncio.get_running_loop().time(), False
        try:
            async with asyncio.timeout(READ_S), engine.begin() as connection:
                if not all(each.is_checked for each in self.reconcilers):
                    await unload_ended(connection, None, "controller")
                self.versions = await list_servable(connection)
            self._engine, self._read_at, is_up = engine, read_at, True
        finally:
            self.up = is_up
            STORE_UP.set(is_up)
        if not all(each.is_checked for each in self.reconcilers):
            return
        serving = {one.name: one.served_name for one in self.versions if one.state == "serving"}
        for one in self.versions:
            asked = [each for each in self.reconcilers if one.served_name in each.names]
            is_lost = bool(asked) and all(
                each.gave_up(one.served_name) and serving.get(one.name) not in each.troubles
                for each in asked
            )
            if is_lost and one.state in ("retired", "rolled_back"):
                async with engine.begin() as connection:
                    of_version = one.name, [one.version], "no model server can load it"
                    await mark_unloaded(connection, *of_version, "controller", is_lost=True)


class ReplicaController:
    """Keep the adapters of one replica loaded."""

    def __init__(self, server: ModelServer, servable: ServableVersions, poll_s: float) -> None:
        """Store the replica, what the store lists, and the pause between two looks."""
        url = server.url
        self.reconciler = Reconciler(server, lambda outcome: LOADS.labels(url, outcome).inc())
        servable.reconcilers.append(self.reconciler)
        self._url = url
        self._servable = servable
        self._poll_s = poll_s
        self._up: bool | None = None
        failures = (outcome for outcome, _ in OUTCOMES.values())
        begin_at_zero({LOADS: [[url], ("loaded", "replaced", "refused", *failures)]})
        REPLICA_UP.labels(url).set(0)
        MISSING.labels(url).set(0)

    async def follow(self) -> None:
        """Look at the replica again and again; never return."""
        while True:
            servable = self._servable
            try:
                if not self.reconciler.may_skip(servable.versions):
                    await self.reconciler.look(
                        servable.versions, may_load=servable.may_load, unserved=servable.unserved
                    )
                    self._note(True)
            except UpstreamAway as error:
                self._note(False, str(error))
            except Exception:
                log.exception("replica_not_kept", replica=self._url)
            MISSING.labels(self._url).set(self.reconciler.missing)
            await asyncio.sleep(self._poll_s)

    def _note(self, up: bool, reason: str | None = None) -> None:
        """Show whether the replica answers; log it only when that changes."""
        REPLICA_UP.labels(self._url).set(up)
        if up is not self._up:
            if up:
                log.info("replica_answers", replica=self._url)
            else:
                log.warning("replica_away", replica=self._url, reason=reason)
        self._up = up


def show_troubles(controllers: Iterable[ReplicaController]) -> dict[str, dict[str, object]]:
    """Set the gauges of versions that are not loaded, and return the reasons for `/readyz`.

    What is wrong with files is the same for each replica; what a replica serves is its own.
    """
    altered: dict[str, object] = {}
    unread: dict[str, object] = {}
    misserved: dict[str, dict[str, str]] = {}
    ALTERED.clear()
    MISSERVED.clear()
    for controller in controllers:
        url = controller.reconciler.server.url
        for name, error in controller.reconciler.troubles.items():
            if isinstance(error, FilesAltered):
                altered[name] = str(error)
                ALTERED.labels(name).set(1)
            elif isinstance(error, FilesUnread | NotFetched):
                unread[name] = str(error)
            elif isinstance(error, Misserved):
                misserved.setdefault(url, {})[name] = str(error)
                MISSERVED.labels(url, name).set(1)
    return {"altered": altered, "unread": unread, "misserved": {**misserved}}
