"""Finish or release the update that a killed or stopped trainer left running.

A version exists from the moment its folder is renamed into place. A running update whose folder
exists is recorded from its manifest; one without a folder is abandoned, and its episodes are free
again.
"""

from collections.abc import Sequence
from pathlib import Path
from uuid import UUID

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from store.connection.availability import is_unavailable
from store.errors import ClaimLost, ClaimSpoilt
from store.updates import claims
from store.updates.claims import IMPORTED_FROM
from store.versions import PolicyVersion
from trainer.errors import AdapterError, FilesUnread
from trainer.publishing import adapters
from trainer.publishing.probe import ProbeRow
from trainer.publishing.publisher import Publisher, is_too_far
from trainer.recipes.recipe import GateOptions
from trainer.updates.recording import Recording
from trainer.updates.versions import Versions

log = structlog.get_logger()


class Recovery:
    """Bring one policy's unfinished updates and unpublished versions to an end."""

    def __init__(
        self,
        engine: AsyncEngine,
        adapter_dir: Path,
        policy: str,
        versions: Versions,
        recording: Recording,
    ) -> None:
        """Store the database, the folder of versions, the policy's name, and what records them."""
        self._engine = engine
        self._adapter_dir = adapter_dir
        self._policy = policy
        self._versions = versions
        self._recording = recording

    async def finish(self, why: str) -> None:
        """Record the running update if its version exists; else release its episodes.

        `why` is recorded with the released update.

        Raises:
            AdapterError: the version's files differ from its manifest.
            FilesUnread: files cannot be read for now, so that nobody knows if the version exists.
            ClaimLost: the update was ended by another trainer meanwhile.
        """
        async with self._engine.connect() as connection:
            running = await claims.running_update(connection, self._policy)
        if running is None:
            return
        written = adapters.find_update(self._adapter_dir, self._policy, running)
        if written is None:
            await self.give_up(running, why)
            return
        try:
            await self._recording.found_version(running, *written)
        except ClaimSpoilt as error:
            await self.give_up(running, str(error))

    async def finish_if_possible(self, why: str) -> None:
        """Do what `finish` does, unless database or files are away, or another trainer took over.

        The next trainer of the policy finds the update then (`finish`).
        """
        try:
            await self.finish(why)
        except Exception as error:
            if not (is_unavailable(error) or isinstance(error, (ClaimLost, FilesUnread))):
                raise
            log.warning("update_left", reason=str(error))

    async def publish_written(self, publisher: Publisher) -> str | None:
        """Publish the newest version that was written and not published; reject those before it.

        With a gate it is published once so many updates made it that it is a candidate, and those
        before it stay `written` until then. Return why the newest was rejected, or None if it was
        not, or there is none.

        Raises:
            AdapterError: the version's files are missing or differ from its manifest.
            UpstreamAway: no model server answers; the version stays `written`.
            FilesUnread: its files cannot be read for now; the version stays `written`.
        """
        written = await self._versions.written()
        if not written:
            return None
        *before, newest = written
        if not publisher.gate.is_gated:
            for version in before:
                why = f"{newest.served_name} is newer, and neither was published"
                await self._versions.reject(version, why)
        return await self.publish_one(publisher, newest)

    async def publish_one(
        self, publisher: Publisher, version: PolicyVersion, *, is_due: bool = False
    ) -> str | None:
        """Publish a version that was written, as `publish` says; its manifest has the probe.

        What was imported is due.

        Raises:
            AdapterError: the version's files are missing or differ from its manifest.
            UpstreamAway: no model server answers; the version stays `written`.
            FilesUnread: its files cannot be read for now; the version stays `written`.
        """
        manifest = adapters.read_manifest(Path(version.adapter_path or ""))
        if manifest is None:
            raise AdapterError(f"the files of {version.served_name} are gone")
        is_due = is_due or IMPORTED_FROM in manifest.metrics
        return await self.publish(publisher, version, manifest.probe, is_due=is_due)

    async def publish(
        self,
        publisher: Publisher,
        version: PolicyVersion,
        probe: Sequence[ProbeRow],
        *,
        is_due: bool = False,
    ) -> str | None:
        """Publish a recorded version, unless more updates are due before, or its parent is lost.

        If it `is_due`, none are. Return why it was rejected, or None if it was not. Where it went
        too far from its base model, what of it did not is published instead.

        Raises:
            AdapterError: the files of what is published instead are missing.
            UpstreamAway: no model server answers; the version stays `written`.
            FilesUnread: its files cannot be read for now; the version stays `written`.
        """
        lost = await self._versions.reject_orphan(version)
        if lost is not None:
            log.error("version_rejected", version=version.served_name, reason=lost)
            return lost
        if not is_due and not await self._is_due(version, publisher.gate):
            return None
        serving = await self._versions.serving()
        why = await publisher.try_to_publish(version, serving.served_name, probe)
        # What is due was imported: what waits to be published is of another line.
        if why is not None and not is_due and is_too_far(version, publisher.gate):
            await self._publish_what_is_left(publisher)
        return why

    async def _publish_what_is_left(self, publisher: Publisher) -> None:
        """Publish the newest version that is `written` still, whatever number of updates made it.

        It is as far as the bound lets a candidate come: each update from it may go too far again.
        """
        written = await self._versions.written()
        if written:
            await self.publish_one(publisher, written[-1], is_due=True)

    async def _is_due(self, version: PolicyVersion, gate: GateOptions) -> bool:
        """Return whether enough updates made a version; without a gate one is enough."""
        if not gate.is_gated or gate.updates_per_candidate == 1:
            return True
        made_by = await self._versions.updates_since_candidate(version)
        return made_by >= gate.updates_per_candidate

    async def give_up(self, update_id: UUID, why: str) -> None:
        """Abandon a running update: its episodes are free again, and its version is not recorded.

        A folder that it wrote keeps its number, which no later version gets.
        """
        async with self._engine.begin() as connection:
            freed = await claims.release(connection, update_id, why)
        log.warning("update_abandoned", update=str(update_id), episodes_freed=freed)
