"""Have a version loaded before it serves again, in place of one that is rolled back.

What was retired is on no server, and requests for it would wait, and fail. So it is made servable
first, by which every controller keeps it loaded, and it gets the traffic once all replicas that
answer have it. If one refuses it, the base model serves instead, which is always there.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import structlog
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from store import adapter_slots
from store.errors import StateChanged
from store.records import Record
from store.version_queries import numbered_version, version_before, was_called_back
from store.version_states import change_state, lock_policies, roll_back
from store.versions import Actor, PolicyVersion
from trainer.errors import FilesUnread, NotFetched, PublishError, UpstreamAway
from trainer.publishing.model_server import ModelServer, Replicas
from trainer.publishing.pacing import LONGEST_PIN_S, fewest_slots
from trainer.publishing.publisher import PROXY_REFRESH_S
from trainer.publishing.reconciler import belonging, load_version, to_load

log = structlog.get_logger()

# What is bad serves meanwhile, so a load that takes longer is not waited for.
LOAD_S: Final = 30.0


class RollbackTarget(Record, frozen=True, kw_only=True):
    """Name what is to serve again, and its base model; they are one if no adapter had served."""

    version: PolicyVersion
    base: PolicyVersion


class Loaded(Record, frozen=True, kw_only=True):
    """Say what came of loading `version`: why it cannot serve, or None if it can.

    `refused` says that a replica cannot have it; else no replica could be asked.
    """

    version: PolicyVersion
    why_not: str | None = None
    refused: bool = False


async def call_back(
    connection: AsyncConnection,
    version: PolicyVersion,
    actor: Actor,
    first: PolicyVersion | None = None,
) -> tuple[RollbackTarget, str | None]:
    """Return what would serve if `version` lost the traffic, and why it became servable, if it did.

    If it had been retired it is `published` from now on. With `first`, what had the traffic since
    that would lose it for good as well (`store.version_states.roll_back`).

    Raises:
        StateChanged: it has another state by now.
    """
    # First the policy, as whoever changes its states: two would wait for each other otherwise.
    await lock_policies(connection, [version.name])
    before = await version_before(connection, first or version)
    why = None
    if before.state == "retired":
        why = f"it is loaded, to serve again in place of {version.served_name}"
        await change_state(connection, before, "published", reason=why, actor=actor)
    servable = await numbered_version(connection, version.name, before.version)
    base = await numbered_version(connection, version.name, 0)
    assert servable is not None
    assert base is not None
    return RollbackTarget(version=servable, base=base), why


async def load_again(replicas: Replicas, before: RollbackTarget) -> Loaded:
    """Load a version on every replica of its base model that answers and lacks it."""
    version = before.version
    if not version.version:
        return Loaded(version=version)
    try:
        async with asyncio.timeout(LOAD_S):
            has_it = await replicas.ask(lambda server: _load(server, before))
    except (PublishError, FilesUnread, NotFetched) as error:
        return Loaded(version=version, why_not=str(error), refused=True)
    except UpstreamAway as error:
        return Loaded(version=version, why_not=str(error))
    except TimeoutError:
        late = f"it was not loaded within {LOAD_S:g} s"
        return Loaded(version=version, why_not=late, refused=True)
    if not any(has_it.values()):
        nobody = f"no replica that answers serves its base model, {before.base.served_name}"
        return Loaded(version=version, why_not=nobody)
    return Loaded(version=version)


async def _load(server: ModelServer, target: RollbackTarget) -> bool:
    """Load a version on one replica, and return whether that has it: it has its base model."""
    version = target.version
    listed = await server.models()
    if not belonging([version, target.base], listed):
        return False
    if to_load([version], listed):
        try:
            await load_version(server, version)
        except NotFetched:
            # The server's machine may have had the files, though this one gets none for now.
            if to_load([version], await server.models()):
                raise
    return True


async def roll_back_to(
    connection: AsyncConnection,
    version: PolicyVersion,
    loaded: Loaded,
    *,
    reason: str,
    actor: Actor,
    evidence: Mapping[str, Any] | None = None,
    first: PolicyVersion | None = None,
) -> PolicyVersion:
    """Roll back what serves, and return what serves instead: what was loaded, or the base model.

    With `first`, all that had the traffic since that is rolled back with it.

    What no replica could be asked about serves if it had its place on them all along; the store
    knows that, since whoever called it back may have been killed.

    Raises:
        StateChanged: one of them has another state by now; nothing was written.
        NotGated: the version does not serve.
    """
    await lock_policies(connection, [version.name])
    before, why = loaded.version, loaded.why_not
    if (await version_before(connection, first or version)).version != before.version:
        raise StateChanged(
            f"{before.served_name} was loaded, to serve in place of {version.served_name}, and does"
            " not come next any more, so nothing was changed: decide again"
        )
    to_base = None
    called_back = await was_called_back(connection, before)
    if why is not None and (loaded.refused or called_back):
        to_base = f"{before.served_name}, which served before it, could not be loaded: {why}"
        if called_back and loaded.refused:
            again = f"it could not be loaded: {why}"
            await change_state(connection, before, "retired", reason=again, actor=actor)
    serves = await roll_back(
        connection,
        version,
        reason=reason,
        actor=actor,
        evidence=evidence,
        to_base=to_base,
        first=first,
    )
    assert serves is not None
    return serves


async def make_room(
    engine: AsyncEngine, replicas: Replicas, version: PolicyVersion, actor: Actor
) -> None:
    """Retire another version if one that was called back is more than the servers have slots for.

    It goes from the proxies at once, and is unloaded later, when none asks for it any more. Whoever
    comes after one that was killed makes what room is still to be made. While no server answers
    there is none to be made; nor if a trainer holds the slots for longer than a moment.
    """
    async with engine.connect() as connection:
        if not await was_called_back(connection, version):
            return
    try:
        known = await fewest_slots(replicas)
    except UpstreamAway:
        # Nor can it be loaded: that is tried next, and told.
        return
    try:
        async with engine.begin() as connection:
            name = await adapter_slots.make_room(
                connection,
                version,
                known,
                PROXY_REFRESH_S,
                LONGEST_PIN_S,
                actor=actor,
            )
    except (DBAPIError, TimeoutError, StateChanged) as error:
        # A trainer may be stopped or cut off while it counts the slots. Without room the version
        # is slower, but serves again.
        log.warning("no_room_made", needed_for=version.served_name, reason=str(error)[:200])
        return
    if name is not None:
        log.warning("version_retired_for_its_slot", version=name, needed_for=version.served_name)
