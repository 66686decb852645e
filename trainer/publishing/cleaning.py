"""Delete version files that are no longer needed (docs/decisions/049-files-kept-by-state.md).

Written and servable versions keep their files and optimiser states: versions that serve or may
serve, the control, the target of a roll-back, and versions that old episodes still use. So training
and a roll-back are always possible. A few older versions that once served keep their files without
optimiser states, for a person to go back to. All other files are deleted once nobody reads them.

A version is marked as deleted in the store before its folder is renamed and removed, so that a
reader finds either all of its files or the reason why there are none. The next run completes a
deletion that was killed.
"""

import asyncio
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from store.version_queries import (
    mark_files_deleted,
    versions_with_files,
    versions_with_unneeded_files,
)
from store.versions import PolicyVersion
from trainer.errors import NotFetched, UpstreamAway
from trainer.publishing import adapters
from trainer.publishing.model_server import ModelServer, Replicas

log = structlog.get_logger()

# Seconds between a version's unloading and the deletion of its files: by then every load or call
# that began before has ended.
IDLE_S: Final = 900.0


def leftover_folders(versions: Sequence[PolicyVersion], folders: Iterable[int]) -> list[int]:
    """Return the numbers of folders whose version is unrecorded, or marked as deleted (pure).

    A folder with a higher number than every version with files stays, so that its number is not
    used again.
    """
    with_files = {version.version for version in versions if not version.files_deleted}
    newest = max(with_files, default=0)
    return [number for number in folders if number not in with_files and number < newest]


class Cleaning:
    """Deletes files of one policy's versions that are no longer needed."""

    def __init__(self, engine: AsyncEngine, servers: Replicas, policy: str, root: Path) -> None:
        self._engine = engine
        self._servers = servers
        self._policy = policy
        self._root = root

    async def clean(self) -> None:
        """Delete half-written folders, and files that nobody reads any more.

        A deletion that the disk refuses is logged and tried again the next time. If the caller is
        cancelled, the deletions are completed first.
        """
        work = asyncio.ensure_future(self._clean())
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])
            raise

    async def _clean(self) -> None:
        adapters.remove_half_written(self._root, self._policy)
        marked = await self._mark_deleted()
        if marked:
            log.info("versions_deleted", policy=self._policy, versions=sorted(marked))
        async with self._engine.connect() as connection:
            versions = await versions_with_files(connection, self._policy)
        folders = dict(adapters.version_folders(self._root, self._policy))
        for number in leftover_folders(versions, folders):
            await self._delete_files(folders.pop(number))
        for version in versions:
            keeps_state = version.is_servable or version.state == "written"
            if version.version in folders and not keeps_state:
                state = folders[version.version] / adapters.STATE_FOLDER
                await asyncio.to_thread(shutil.rmtree, state, ignore_errors=True)

    async def _mark_deleted(self) -> set[int]:
        """Mark unneeded versions that no server has loaded as deleted; return their numbers."""
        async with self._engine.connect() as connection:
            unneeded = await versions_with_unneeded_files(connection, self._policy, IDLE_S)
        if not unneeded:
            return set()
        loaded = await self._loaded_names()
        if loaded is None:
            return set()
        deletable = [version.version for version in unneeded if version.served_name not in loaded]
        async with self._engine.begin() as connection:
            return await mark_files_deleted(connection, self._policy, deletable)

    async def _loaded_names(self) -> set[str] | None:
        """Return every name that some replica has loaded, or None if a replica does not answer.

        vLLM reads a folder again long after loading it, and its engine dies if the folder is gone.
        """
        try:
            listed = await self._servers.ask(ModelServer.models)
        except UpstreamAway:
            return None
        if len(listed) < len(self._servers.each):
            return None
        return {name for models in listed.values() for name in models}

    async def _delete_files(self, folder: Path) -> None:
        """Delete a version's files, first those at PAWL_ADAPTER_SOURCE, then the local folder."""
        try:
            await self._servers.files.withdraw(folder)
            await asyncio.to_thread(adapters.remove_folder, folder)
        except (NotFetched, OSError) as error:
            log.error("files_not_deleted", folder=str(folder), reason=str(error))
