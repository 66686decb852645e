"""Make room on the model servers for a version that had been retired and is to serve again.

A server computes with so many adapters at once; requests of one more wait until another's have
ended, and what serves has the most of them
(docs/decisions/108-what-is-rejected-with-a-candidate.md).
"""

import structlog
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from store import adapter_slots
from store.errors import StateChanged
from store.version_queries import was_called_back
from store.versions import Actor, PolicyVersion
from trainer.errors import UpstreamAway
from trainer.publishing.pacing import fewest_slots
from trainer.publishing.publish import PROXY_REFRESH_S
from trainer.publishing.replicas import Replicas
from trainer.recipes.adapter import PublishOptions

log = structlog.get_logger()


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
                PublishOptions().longest_pin_s,
                actor=actor,
            )
    except (DBAPIError, TimeoutError, StateChanged) as error:
        # A trainer may be stopped or cut off while it counts the slots. Without room the version
        # is slower, but serves again.
        log.warning("no_room_made", needed_for=version.served_name, reason=str(error)[:200])
        return
    if name is not None:
        log.warning("version_retired_for_its_slot", version=name, needed_for=version.served_name)
