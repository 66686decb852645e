"""Keep each replica of the model server reconciled with the servable versions in the store.

Replicas are reconciled independently, so a slow or absent one delays no other. While the database
is away, the last reading is used for a limited time: the trainer, which may still reach the
database, deletes a version's files a while after it was unloaded.
"""

import asyncio
from collections.abc import Iterable
from typing import Final

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from controller.metrics import (
    ADAPTER_LOADS,
    ALTERED_ADAPTERS,
    DATABASE_UP,
    MISSERVED_ADAPTERS,
    MISSING_ADAPTERS,
    REPLICA_UP,
)
from controller.reconciler import OUTCOMES, Reconciler
from store.adapter_slots import unload_unused_versions
from store.metrics import begin_at_zero
from store.version_queries import idle_versions, list_servable
from store.version_states import mark_unloaded
from store.versions import PolicyVersion
from trainer.errors import FilesAltered, FilesUnread, Misserved, NotFetched, UpstreamAway
from trainer.publishing.cleaning import IDLE_S
from trainer.publishing.model_server import LIST_TIMEOUT_S, TIMEOUT_S, ModelServer

log = structlog.get_logger()

READ_S: Final = 10.0
# All proxies know of a change after this long; they read the policies twice a second.
PROXY_REFRESH_S: Final = 10.0
# The greatest age of a reading to load by. A load then ends before the trainer deletes the files of
# a version that was unloaded just after the reading.
OLDEST_S: Final = IDLE_S - TIMEOUT_S - LIST_TIMEOUT_S


class ServableVersions:
    """The last reading of the servable versions; each replica's `Reconciler` loads them.

    Attributes:
        versions: the servable versions and each policy's base model; None before the first reading.
        up: whether the last reading succeeded.
        reconcilers: those of all replicas.
    """

    def __init__(self) -> None:
        self._engine: AsyncEngine | None = None
        self._read_at = 0.0
        self.versions: list[PolicyVersion] | None = None
        self.up = False
        self.reconcilers: list[Reconciler] = []

    def may_load(self, version: PolicyVersion) -> bool:
        """Return whether a version is still servable, and the reading recent enough to load it.

        A serving version is loaded by a reading of any age, as its files are kept for longer: it
        must first lose the traffic and be idle before it is unloaded.
        """
        if version not in (self.versions or ()):
            return False
        age_s = asyncio.get_running_loop().time() - self._read_at
        return version.state == "serving" or age_s <= OLDEST_S

    async def unserved(self) -> list[PolicyVersion]:
        """Return the rejected and unloaded versions that no proxy sends calls to any more.

        While the database does not answer, the list is empty.
        """
        if self._engine is None or not self.up:
            return []
        async with self._engine.connect() as connection:
            return [
                version
                for name in sorted({one.name for one in self.versions or ()})
                for version in await idle_versions(connection, name, PROXY_REFRESH_S)
            ]

    async def look(self, engine: AsyncEngine) -> None:
        """Read `versions`; mark retired and rolled-back ones that no replica can load as unloaded.

        Their episodes go on with the serving version, and a lost control gets no new episodes. If
        their policy's serving version is in trouble too, the server or the disk is at fault, and
        they are not marked. After a start of a replica or of the controller, versions that lost the
        traffic and have no episode under way are marked unloaded instead of being loaded again.
        """
        read_at, is_up = asyncio.get_running_loop().time(), False
        try:
            async with asyncio.timeout(READ_S), engine.begin() as connection:
                if not all(each.is_checked for each in self.reconcilers):
                    await unload_unused_versions(connection, None, "controller")
                self.versions = await list_servable(connection)
            self._engine, self._read_at, is_up = engine, read_at, True
        finally:
            self.up = is_up
            DATABASE_UP.set(is_up)
        if not all(each.is_checked for each in self.reconcilers):
            return
        serving = {one.name: one.served_name for one in self.versions if one.state == "serving"}
        for one in self.versions:
            asked = [each for each in self.reconcilers if one.served_name in each.names]
            is_lost = bool(asked) and all(
                each.has_given_up_on(one.served_name) and serving.get(one.name) not in each.troubles
                for each in asked
            )
            if is_lost and one.state in ("retired", "rolled_back"):
                async with engine.begin() as connection:
                    of_version = one.name, [one.version], "no model server can load it"
                    await mark_unloaded(connection, *of_version, "controller", is_lost=True)


class ReplicaController:
    """Keep the adapters of one replica loaded."""

    def __init__(self, server: ModelServer, servable: ServableVersions, poll_s: float) -> None:
        """Store the server; each look is `poll_s` seconds after the one before, or is skipped."""
        url = server.url
        self.reconciler = Reconciler(
            server, lambda outcome: ADAPTER_LOADS.labels(url, outcome).inc()
        )
        servable.reconcilers.append(self.reconciler)
        self._url = url
        self._servable = servable
        self._poll_s = poll_s
        self._up: bool | None = None
        failures = (outcome for outcome, _ in OUTCOMES.values())
        begin_at_zero({ADAPTER_LOADS: [[url], ("loaded", "replaced", "refused", *failures)]})
        REPLICA_UP.labels(url).set(0)
        MISSING_ADAPTERS.labels(url).set(0)

    async def reconcile_forever(self) -> None:
        """Look at the replica repeatedly, with skips (`Reconciler.skip_look`); never return."""
        while True:
            servable = self._servable
            try:
                if not self.reconciler.skip_look(servable.versions):
                    await self.reconciler.look(
                        servable.versions, may_load=servable.may_load, unserved=servable.unserved
                    )
                    self._note_answer(True)
            except UpstreamAway as error:
                self._note_answer(False, str(error))
            except Exception:
                log.exception("replica_not_kept", replica=self._url)
            MISSING_ADAPTERS.labels(self._url).set(self.reconciler.missing)
            await asyncio.sleep(self._poll_s)

    def _note_answer(self, up: bool, reason: str | None = None) -> None:
        """Set the gauge for whether the replica answers; log only a change."""
        REPLICA_UP.labels(self._url).set(up)
        if up is not self._up:
            if up:
                log.info("replica_answers", replica=self._url)
            else:
                log.warning("replica_away", replica=self._url, reason=reason)
        self._up = up


def show_troubles(controllers: Iterable[ReplicaController]) -> dict[str, dict[str, object]]:
    """Set the gauges of versions that are not loaded, and return the reasons for `/readyz`.

    Trouble with files is the same for each replica; `misserved` is by replica.
    """
    altered: dict[str, object] = {}
    unread: dict[str, object] = {}
    misserved: dict[str, dict[str, str]] = {}
    ALTERED_ADAPTERS.clear()
    MISSERVED_ADAPTERS.clear()
    for controller in controllers:
        url = controller.reconciler.server.url
        for name, error in controller.reconciler.troubles.items():
            if isinstance(error, FilesAltered):
                altered[name] = str(error)
                ALTERED_ADAPTERS.labels(name).set(1)
            elif isinstance(error, FilesUnread | NotFetched):
                unread[name] = str(error)
            elif isinstance(error, Misserved):
                misserved.setdefault(url, {})[name] = str(error)
                MISSERVED_ADAPTERS.labels(url, name).set(1)
    return {"altered": altered, "unread": unread, "misserved": {**misserved}}
