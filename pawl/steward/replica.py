"""Load what one replica of the model server lacks, and let nothing else serve a name.

Each replica is looked at on its own, so that one that is away or slow delays no other. What it is
loaded with it must serve as it was trained: it may have been restarted with another base model.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import structlog

from pawl.steward.known import Known
from pawl.steward.metrics import LOADS, MISSING, REPLICA_UP
from store.versions import PolicyVersion
from trainer.errors import (
    FilesAltered,
    FilesUnread,
    Misserved,
    PublishError,
    TrainerError,
    UpstreamAway,
)
from trainer.publishing.probing.loading import check_served
from trainer.publishing.servable import Listed, belonging, lacking, with_other_files
from trainer.publishing.server import ModelServer

log = structlog.get_logger()

FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0
# What a try to load that failed is counted as, and called in the log; all others are `refused`.
_OUTCOMES: Final[Mapping[type[TrainerError], tuple[str, str]]] = {
    FilesAltered: ("altered", "adapter_altered"),
    FilesUnread: ("unread", "adapter_unread"),
    Misserved: ("misserved", "adapter_misserved"),
}


class Refusals:
    """Decide when each version that a replica refused may be tried again: later each time."""

    def __init__(self) -> None:
        """Begin with no refusal."""
        self._next: dict[str, tuple[float, float]] = {}

    def allow(self, name: str, now: float) -> bool:
        """Return whether the version may be tried now."""
        return now >= self._next.get(name, (0.0, 0.0))[0]

    def add(self, name: str, now: float) -> float:
        """Note a refusal; return the seconds until the next try."""
        _, before_s = self._next.get(name, (0.0, 0.0))
        pause_s = min(LONGEST_PAUSE_S, 2 * before_s or FIRST_PAUSE_S)
        self._next[name] = (now + pause_s, pause_s)
        return pause_s

    def forget(self) -> None:
        """Forget all of them: a replica that was away may have been put right."""
        self._next.clear()


class ReplicaKeeper:
    """Keep the adapters of one replica loaded."""

    def __init__(self, server: ModelServer, known: Known, poll_s: float) -> None:
        """Store the replica, what the store lists, and the pause between two looks."""
        self._server = server
        self._known = known
        self._poll_s = poll_s
        self._refusals = Refusals()
        self._up: bool | None = None
        # Whether what it listed when it was first seen is as it was trained.
        self._is_checked = False
        REPLICA_UP.labels(server.url).set(0)
        MISSING.labels(server.url).set(0)

    async def keep(self) -> None:
        """Look at the replica again and again; never return."""
        while True:
            try:
                await self.look()
            except UpstreamAway as error:
                self._note(False, str(error))
            except Exception:
                log.exception("replica_not_kept", replica=self._server.url)
            await asyncio.sleep(self._poll_s)

    async def look(self) -> None:
        """Load what the replica lacks, and replace what has other files under its name.

        Raises:
            UpstreamAway: the replica does not answer.
        """
        listed = await self._server.models()
        self._note(True)
        wanted = belonging(self._known.versions or (), listed)
        waiting = lacking(wanted, listed) + with_other_files(wanted, listed)
        MISSING.labels(self._server.url).set(len(waiting))
        loaded = [await self._load(version, listed) for version in waiting]
        MISSING.labels(self._server.url).set(loaded.count(False))
        for version in wanted:
            if version not in waiting and self._known.troubled(version):
                await self._check_again(version)
        if not self._is_checked and self._known.versions is not None:
            for version in wanted:
                if version not in waiting:
                    await self._check_listed(version)
            self._is_checked = True

    async def _load(self, version: PolicyVersion, listed: Listed) -> bool:
        """Load one version, and return whether the replica has it now, or need not have it."""
        name, loop = version.served_name, asyncio.get_running_loop()
        # Loading the others took a while: this one may have been retired meanwhile.
        if not self._known.wants(version):
            return True
        if not (self._known.may_load(version) and self._refusals.allow(name, loop.time())):
            return False
        try:
            await self._known.check(version)
            if name in listed:
                await self._unload_others(version)
            await self._server.load(name, Path(version.adapter_path or ""))
            await check_served(self._server, version)
        except (PublishError, FilesUnread) as error:
            self._put_off(name, error)
            return False
        self._known.note_served(self._server.url, name, None)
        LOADS.labels(self._server.url, "replaced" if name in listed else "loaded").inc()
        log.info("adapter_loaded", version=name, replica=self._server.url)
        return True

    def _put_off(self, name: str, error: PublishError | FilesUnread) -> None:
        """Count and log why a version was not loaded; it is tried again after a pause."""
        pause_s = self._refusals.add(name, asyncio.get_running_loop().time())
        outcome, event = _OUTCOMES.get(type(error), ("refused", "adapter_not_loaded"))
        LOADS.labels(self._server.url, outcome).inc()
        if isinstance(error, Misserved):
            self._known.note_served(self._server.url, name, str(error))
        log.error(
            event,
            version=name,
            replica=self._server.url,
            reason=str(error),
            again_in_s=pause_s,
        )

    async def _check_again(self, version: PolicyVersion) -> None:
        """Check files that were in trouble, and whose version somebody else has loaded since."""
        name, loop = version.served_name, asyncio.get_running_loop()
        if not self._refusals.allow(name, loop.time()):
            return
        try:
            await self._known.check(version)
        except (FilesAltered, FilesUnread):
            self._refusals.add(name, loop.time())

    async def _check_listed(self, version: PolicyVersion) -> None:
        """Check what a replica had loaded before this steward saw it: nobody else may have."""
        try:
            await check_served(self._server, version)
        except (PublishError, FilesUnread) as error:
            self._put_off(version.served_name, error)

    async def _unload_others(self, version: PolicyVersion) -> None:
        """Unload the other files under a version's name, unless another steward has done so."""
        served = (await self._server.models()).get(version.served_name)
        if served is not None and with_other_files([version], {version.served_name: served}):
            log.error(
                "adapter_has_other_files", version=version.served_name, served=served.get("root")
            )
            await self._server.unload(version.served_name)

    def _note(self, up: bool, reason: str | None = None) -> None:
        """Show whether the replica answers; log it only when that changes."""
        REPLICA_UP.labels(self._server.url).set(up)
        if up is not self._up:
            if up:
                log.info("replica_answers", replica=self._server.url)
            else:
                log.warning("replica_away", replica=self._server.url, reason=reason)
                self._refusals.forget()
                self._known.forget_replica(self._server.url)
                self._is_checked = False
        self._up = up
