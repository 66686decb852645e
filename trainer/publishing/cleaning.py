"""Delete the files that nothing can ask for any more (docs/decisions/049-files-kept-by-state.md).

A version is marked in the store before its folder is renamed and removed, so that a reader finds
either all of its files or the reason why there are none, and a kill leaves what the next run ends.
"""

import asyncio
import shutil
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from store.version_queries import (
    OnceServed,
    RollbackTargets,
    mark_deleted,
    rollback_targets,
    unasked_versions,
    versions_with_files,
)
from store.versions import SERVABLE, PolicyVersion
from trainer.errors import NotFetched, UpstreamAway
from trainer.publishing import adapters
from trainer.publishing.model_server import TIMEOUT_S, ModelServer, Replicas

# States in which a version's files are read: it is published, or may be.
IN_USE: Final = ("written", *SERVABLE)
# Those from which training may go on.
HEADS: Final = ("written", "ready", "candidate", "canary", "serving")
# How many times as far back the next that stays may be: at that distance a roll-back loses as much
# again as has fallen.
SPARSE: Final = 2


def spaced(served: Sequence[OnceServed]) -> set[int]:
    """Return some of the versions that had the traffic, fewer the longer ago they had it.

    Of two that are neighbours one is at most `SPARSE` times as far back as the other, unless there
    was nothing between them; so of 10,000 versions about twenty are left. Nothing that is left out
    now is needed later: the longer ago both were, the nearer they are to each other.

    Args:
        served: those whose files are there, the last first.
    """
    kept = list(served[:1])
    for version, before in pairwise(served[1:]):
        if before.place > SPARSE * kept[-1].place:
            kept.append(version)
    return {version.version for version in (*kept, *served[-1:])}


def kept_files(versions: Sequence[PolicyVersion], back: RollbackTargets) -> set[int]:
    """Return the versions whose files stay whatever else is known.

    They are in use, or a roll-back may give them the traffic. While the base model has a share of
    the episodes, a fall may be found long after it began, and so the traffic may go back a long
    way.
    """
    in_use = _numbers(version for version in versions if version.state in IN_USE)
    is_watched = any(version.version == 0 and version.share for version in versions)
    far = spaced(back.served) if is_watched else set()
    return in_use | _last_good(versions, back) | far


def kept_states(versions: Sequence[PolicyVersion], back: RollbackTargets) -> set[int]:
    """Return the versions that training may go on from, whose optimiser states stay.

    That is the one with the traffic, the one before it, and those that may still get it. What has
    the traffic again after a longer way back starts anew.
    """
    heads = _numbers(version for version in versions if version.state in HEADS)
    return heads | _last_good(versions, back)


def old_states(
    versions: Sequence[PolicyVersion], back: RollbackTargets, folders: Iterable[int]
) -> list[int]:
    """Return the numbers of folders whose optimiser state training cannot go on from.

    A version that is not recorded yet may be the next to serve.
    """
    old = _numbers(versions) - kept_states(versions, back)
    return [number for number in folders if number in old]


def leftovers(versions: Sequence[PolicyVersion], folders: Iterable[int]) -> list[int]:
    """Return the numbers of folders that no reader is left for.

    They are marked as deleted, or no update recorded them. A folder above all versions that have
    files stays: it keeps its number from being given again.
    """
    there = _numbers(version for version in versions if not version.files_deleted)
    newest = max(there, default=0)
    return [number for number in folders if number not in there and number < newest]


def _last_good(versions: Sequence[PolicyVersion], back: RollbackTargets) -> set[int]:
    """Return the version that would serve if what serves were rolled back, if it has files."""
    return {back.before} & _numbers(versions)


def _numbers(versions: Iterable[PolicyVersion]) -> set[int]:
    return {version.version for version in versions}


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
        folders = dict(adapters.folders(self._root, self._policy))
        for number in leftovers(versions, folders):
            await self._delete(folders.pop(number))
        for number in old_states(versions, back, folders):
            state = folders[number] / adapters.STATE
            if state.exists():
                await asyncio.to_thread(_remove_if_possible, shutil.rmtree, state)

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
        free = [version.version for version in unasked if version.served_name not in loaded]
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

    async def _delete(self, folder: Path) -> None:
        """Delete a version's files: at the source first, which nobody else would find again."""
        try:
            await self._servers.files.withdraw(folder)
        except NotFetched as error:
            log.error("files_not_deleted", folder=str(folder), reason=str(error))
        else:
            await asyncio.to_thread(_remove_if_possible, adapters.remove, folder)

    async def _versions(self) -> tuple[list[PolicyVersion], RollbackTargets]:
        async with self._engine.connect() as connection:
            versions = await versions_with_files(connection, self._policy)
            return versions, await rollback_targets(connection, self._policy)
