"""Delete the files that nothing can ask for any more (docs/decisions/049-files-kept-by-state.md).

A version is marked in the store before its folder is renamed and removed, so that a reader finds
either all of its files or the reason why there are none, and a kill leaves what the next run ends.
"""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from store.version_queries import (
    RollbackTargets,
    mark_deleted,
    rollback_targets,
    unasked_versions,
    versions_with_files,
)
from store.versions import PolicyVersion
from trainer.errors import UpstreamAway
from trainer.publishing import adapters
from trainer.publishing.kept import kept_files, leftovers, old_states
from trainer.publishing.replicas import Replicas
from trainer.publishing.server import TIMEOUT_S, ModelServer

log = structlog.get_logger()

# A load that was begun before a version was retired may end so much later.
LEAST_IDLE_S: Final = 2 * TIMEOUT_S


def _remove_if_possible(remove: Callable[[Path], None], folder: Path) -> None:
    """Remove a folder, or log why the disk refuses."""
    try:
        remove(folder)
    except OSError as error:
        log.error("files_not_deleted", folder=str(folder), reason=str(error))


class Cleaning:
    """Keep the folder of one policy's versions small."""

    def __init__(
        self, engine: AsyncEngine, servers: Replicas, policy: str, root: Path, idle_s: float
    ) -> None:
        """Store the database, the model servers, the policy and the folder of all versions.

        `idle_s` is for how long nobody must have asked for a retired version.
        """
        self._engine = engine
        self._servers = servers
        self._policy = policy
        self._root = root
        self._idle_s = max(idle_s, LEAST_IDLE_S)

    async def clean(self) -> None:
        """Delete what is half written, old optimiser states, and files without a reader.

        What the disk refuses is logged and tried again the next time. If the caller is cancelled,
        it is brought to its end first: a trainer that is stopped leaves what one that ran on does.
        """
        work = asyncio.ensure_future(self._clean())
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])
            raise

    async def _clean(self) -> None:
        adapters.sweep(self._root, self._policy)
        versions, back = await self._versions()
        marked = await self._mark(versions, back)
        if marked:
            versions, back = await self._versions()
            log.info("versions_deleted", policy=self._policy, versions=sorted(marked))
        await asyncio.to_thread(self._remove, versions, back)

    async def _mark(self, versions: list[PolicyVersion], back: RollbackTargets) -> set[int]:
        """Mark the versions that are without a reader, the model servers among them, as deleted."""
        async with self._engine.connect() as connection:
            unasked = await unasked_versions(
                connection, self._policy, kept_files(versions, back), self._idle_s
            )
        if not unasked:
            return set()
        loaded = await self._loaded()
        if loaded is None:
            return set()
        free = [one.version for one in unasked if one.served_name not in loaded]
        async with self._engine.begin() as connection:
            return await mark_deleted(connection, self._policy, free)

    async def _loaded(self) -> set[str] | None:
        """Return every name that some replica has loaded, or None while one does not say.

        vLLM reads a folder again long after it was loaded, and its engine dies if it is not there.
        """
        try:
            listed = await self._servers.ask(ModelServer.models)
        except UpstreamAway:
            return None
        if len(listed) < len(self._servers.each):
            return None
        return {name for models in listed.values() for name in models}

    def _remove(self, versions: list[PolicyVersion], back: RollbackTargets) -> None:
        """Remove the folders that are left over, and the optimiser states that are not kept."""
        folders = dict(adapters.folders(self._root, self._policy))
        for number in leftovers(versions, folders):
            _remove_if_possible(adapters.remove, folders.pop(number))
        for number in old_states(versions, back, folders):
            state = folders[number] / adapters.STATE
            if state.exists():
                _remove_if_possible(shutil.rmtree, state)

    async def _versions(self) -> tuple[list[PolicyVersion], RollbackTargets]:
        async with self._engine.connect() as connection:
            versions = await versions_with_files(connection, self._policy)
            return versions, await rollback_targets(connection, self._policy)
