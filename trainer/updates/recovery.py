"""Finish or release the update that a killed or stopped trainer left running.

A version exists from the moment its folder is renamed into place. A running update whose folder
exists is recorded from its manifest; one without a folder is abandoned, and its episodes are free
again.
"""

from pathlib import Path
from uuid import UUID

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from store.connection.availability import is_unavailable
from store.errors import ClaimLost, TurnedEvaluation
from store.updates import claims
from trainer.errors import AdapterError
from trainer.publishing import adapters
from trainer.publishing.publish import Publisher
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
            ClaimLost: the update was ended by another trainer meanwhile.
        """
        async with self._engine.connect() as connection:
            running = await claims.running_update(connection, self._policy)
        if running is None:
            return
        found = adapters.find_update(self._adapter_dir, self._policy, running)
        if found is None:
            await self.give_up(running, why)
            return
        try:
            await self._recording.found_version(running, *found)
        except TurnedEvaluation as error:
            await self.give_up(running, str(error))

    async def finish_if_possible(self, why: str) -> None:
        """Do what `finish` does, unless the database is away or another trainer has taken over.

        The next trainer of the policy finds the update then (`finish`).
        """
        try:
            await self.finish(why)
        except Exception as error:
            if not (is_unavailable(error) or isinstance(error, ClaimLost)):
                raise
            log.warning("update_left", reason=str(error))

    async def publish_written(self, publisher: Publisher) -> str | None:
        """Publish the newest version that was written and not published; reject those before it.

        Return why the newest was rejected, or None if it serves or there is none.

        Raises:
            AdapterError: the version's files are missing or differ from its manifest.
            UpstreamAway: no model server answers; the version stays `written`.
        """
        written = await self._versions.written()
        for version in written[:-1]:
            await self._versions.reject(version)
        for version in written[-1:]:
            manifest = adapters.read_manifest(Path(version.adapter_path or ""))
            if manifest is None:
                raise AdapterError(f"the files of {version.served_name} are gone")
            serving = await self._versions.serving()
            return await publisher.try_to_publish(version, serving.served_name, manifest.probe)
        return None

    async def give_up(self, update_id: UUID, why: str) -> None:
        """Abandon a running update: its episodes are free again, and its version is not recorded.

        A folder that it wrote keeps its number, which no later version gets.
        """
        async with self._engine.begin() as connection:
            freed = await claims.release(connection, update_id, why)
        log.warning("update_abandoned", update=str(update_id), episodes_freed=freed)
