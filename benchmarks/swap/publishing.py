"""Publish one version after the other as the trainer does, in a process of its own.

What a trainer does after its optimiser step is done with its own parts and in its order: write,
record, load, probe, promote, clean. Between loads it looks once a second, as a trainer does, at
what is to be retired and unloaded; and it waits for a free adapter slot.
"""

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final
from uuid import UUID

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from benchmarks.swap.preparing import PROBE, prepared, probe_of
from benchmarks.swap.records import Event, Load, Seen, Unload, Waited
from benchmarks.swap.schedule import Schedule
from store.connection.engine import make_engine
from store.records import Record
from store.updates import claims
from store.updates.claims import IMPORTED_FROM
from trainer.policy_lock import lock_policy
from trainer.publishing import adapters
from trainer.publishing.adapters import NewVersion
from trainer.publishing.model_server import Replicas
from trainer.publishing.pacing import Pacing
from trainer.publishing.publisher import Publisher
from trainer.recipes.recipe import Recipe, load_recipe
from trainer.updates.recording import Recording
from trainer.updates.recovery import Recovery
from trainer.updates.versions import Versions, begin_policy

LOOK_S: Final = 1.0
# A version is retired and unloaded so long after its last call at most.
UNLOADED_S: Final = 120.0


class Place(Record, frozen=True, kw_only=True):
    """Say where everything is."""

    database_url: str
    server_url: str
    adapter_dir: Path
    prepared: Path
    recipe: str
    policy: str
    slots: int
    log: Path


def publish_all(place: Place, there: Connection) -> None:
    """Publish a first version, then as a schedule says that is received, until it ends.

    Events are sent as they happen; at last None, or the text of an error.
    """
    with place.log.open("a") as log:
        structlog.configure(logger_factory=structlog.PrintLoggerFactory(log))
        try:
            asyncio.run(_publish_all(place, there))
        except Exception as error:
            there.send(f"{type(error).__name__}: {error}")
            raise
    there.send(None)


async def _publish_all(place: Place, there: Connection) -> None:
    async with publishing(place, there.send) as own:
        await own.begin()
        while not there.poll():
            await own.look()
        await own.follow(there.recv())
        await own.end()


@asynccontextmanager
async def publishing(place: Place, tell: Callable[[Event], None]) -> AsyncIterator["Publishing"]:
    """Hold the policy as its trainer does until the block is left; `tell` is called with events.

    Raises:
        TrainerError: a trainer works on the policy.
    """
    engine = make_engine(place.database_url)
    try:
        async with engine.connect() as guard, Replicas([place.server_url]) as servers:
            await lock_policy(guard, place.policy, "publish")
            await begin_policy(engine, place.policy, None, None)
            yield Publishing(place, engine, servers, tell)
            await guard.invalidate()
    finally:
        await engine.dispose()


class Publishing:
    """Publish versions of one policy, and take them from the model server when they are unused."""

    def __init__(
        self, place: Place, engine: AsyncEngine, servers: Replicas, tell: Callable[[Event], None]
    ) -> None:
        self._place, self._engine, self._servers, self._tell = place, engine, servers, tell
        policy, recipe = place.policy, load_recipe(place.recipe)
        self._recipe: Recipe = recipe
        self._publisher = Publisher(engine, servers, policy, recipe.publish)
        self._pacing = Pacing(servers, policy, place.slots, recipe)
        self._versions = Versions(engine, place.adapter_dir, policy)
        self._recording = Recording(engine, policy)
        self._recovery = Recovery(
            engine, place.adapter_dir, policy, self._versions, self._recording
        )
        self._loads = 0
        self._loaded: set[str] = set()
        self._waits = False

    async def begin(self) -> None:
        """Publish the first version, before anything is measured."""
        await self.load()

    async def follow(self, schedule: Schedule) -> None:
        """Publish what is due, until the last turn ends."""
        while (now := time.monotonic()) < schedule.ends:
            # The first version is none of those that the schedule has.
            if self._loads - 1 < schedule.due(now):
                await self.load()
            await self.look()

    async def end(self) -> None:
        """Look until all but the version that serves are unloaded, or should have been."""
        deadline = time.monotonic() + UNLOADED_S
        while len(self._loaded) > 1 and time.monotonic() < deadline:
            await self.look()

    async def look(self) -> None:
        """Bring the model server up to date, as a trainer does, and wait until the next look."""
        began = time.monotonic()
        await self._publisher.reconcile()
        await self._publisher.go_live()
        await self._publisher.retire_idle()
        await self._see()
        await asyncio.sleep(max(0.0, began + LOOK_S - time.monotonic()))

    async def _see(self) -> None:
        """Tell what the model server has now, and what it had before and has no longer."""
        now, listed = time.monotonic(), await self._servers.models()
        loaded = {name for name, model in listed.items() if model.get("parent")}
        for gone in sorted(self._loaded - loaded):
            self._tell(Unload(version=gone, at=now))
        self._loaded = loaded
        self._tell(Seen(at=now, loaded=len(loaded)))

    async def load(self) -> None:
        """Publish one version, unless there is no free slot for it."""
        parent = await self._versions.serving()
        update_id = await self._claim(parent.version)
        if update_id is None:
            if not self._waits:
                self._tell(Waited(at=time.monotonic()))
            self._waits = True
            return
        self._waits = False
        own = prepared(self._place.prepared, self._loads)
        self._loads += 1
        step = time.monotonic()
        new = await self._new(own, parent.version, update_id)
        write = partial(adapters.write_version, self._place.adapter_dir, new, partial(_copy, own))
        folder = await asyncio.to_thread(write)
        await self._recording.imported_version(new, folder)
        recorded = time.monotonic()
        version = await self._versions.numbered(new.version)
        rejected = await self._recovery.publish(self._publisher, version, new.probe, is_due=True)
        self._tell(
            Load(
                version=version.served_name,
                step=step,
                recorded=recorded,
                promoted=time.monotonic(),
                rejected=rejected,
            )
        )
        await self._see()
        await self._publisher.clean(self._place.adapter_dir)

    async def _claim(self, parent: int) -> UUID | None:
        """Reserve a slot, as a claim does; return the update's id, None if there is no slot."""
        policy, recipe = self._place.policy, self._recipe.model_dump(mode="json")
        async with self._engine.begin() as connection:
            if not await self._pacing.allows(connection, _is_wanted):
                return None
            return await claims.begin_update(connection, policy, parent, recipe)

    async def _new(self, own: Path, parent: int, update_id: UUID) -> NewVersion:
        return NewVersion(
            policy=self._place.policy,
            version=await self._versions.next_number(),
            update_id=update_id,
            parent_version=parent,
            outcomes=(),
            metrics={IMPORTED_FROM: str(own)},
            probe=probe_of(own),
        )


async def _is_wanted() -> bool:
    return True


def _copy(own: Path, folder: Path) -> None:
    """Write a prepared adapter as a learner writes a trained one."""
    shutil.copytree(own, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(PROBE))
