"""Make no more versions than the model server has adapter slots for.

A server computes with so many adapters at once (vLLM's `--max-loras`); requests of one more wait
until another's have ended. A version needs its slot for as long as its episodes may call. So
while all are taken no update is claimed: its episodes wait, and the version that it will make
builds on what was learned meanwhile.
"""

import re
from typing import Final

import structlog
from sqlalchemy.ext.asyncio import AsyncConnection

from store.updates import slots
from store.updates.slots import Live, due_in, free_slots
from trainer.errors import UpstreamAway
from trainer.metrics import LIVE, NEXT_VERSION, SLOTS
from trainer.publishing.publish import PROXY_REFRESH_S
from trainer.publishing.replicas import Replicas
from trainer.publishing.server import ModelServer
from trainer.settings import USUAL_SLOTS

log = structlog.get_logger()

_TOLD: Final = re.compile(r'^vllm:lora_requests_info\{[^}\n]*\bmax_lora="(\d+)"', re.MULTILINE)


def told_slots(metrics: str) -> int | None:
    """Return the adapter slots that vLLM's metrics name, or None before its first LoRA request."""
    told = _TOLD.search(metrics)
    return int(told[1]) if told else None


class Pacing:
    """Decide whether a policy's next version may be made."""

    def __init__(
        self, servers: Replicas, policy: str, configured: int | None, longest_s: float
    ) -> None:
        """Store the model servers, the policy's name and the recipe's bound.

        `configured` are the slots of each server; None: as it says itself. Where all slots are
        taken, a version that lost the traffic `longest_s` seconds ago is retired for the next.
        """
        self._servers = servers
        self._policy = policy
        self._slots = configured
        self._longest_s = longest_s
        self._told: str | None = None
        self._was_warned = False
        # Whether the last look allowed no update.
        self.waits = False

    async def allows(self, connection: AsyncConnection) -> bool:
        """Return whether one more version may be made; no other takes a slot until a commit."""
        known = await self._known()
        await slots.lock_slots(connection)
        live = await slots.live_versions(connection, self._policy, PROXY_REFRESH_S, self._longest_s)
        free = free_slots(live, known)
        if not free and not live.unloading:
            await self._retire_longest(connection)
        wait_s = due_in(live, known)
        self._tell(live, known, wait_s, is_free=free > 0)
        self.waits = not free or wait_s > 0.0
        return not self.waits

    async def _known(self) -> int:
        """Return the fewest slots that a replica names, or the usual number if none does."""
        if self._slots is None:
            try:
                texts = (await self._servers.ask(ModelServer.metrics)).values()
            except UpstreamAway:
                # They are asked again; training needs no model server.
                return USUAL_SLOTS
            told = [told_slots(text) for text in texts]
            self._slots = min((one for one in told if one is not None), default=USUAL_SLOTS)
        return self._slots

    async def _retire_longest(self, connection: AsyncConnection) -> None:
        name = await slots.retire_longest(connection, self._policy, self._longest_s)
        if name is not None:
            log.warning("version_retired_for_its_slot", version=name, after_s=self._longest_s)

    def _tell(self, live: Live, known: int, wait_s: float, *, is_free: bool) -> None:
        """Show the slots, and log when the trainer begins to wait for one or for its time."""
        LIVE.labels(self._policy).set(live.total)
        NEXT_VERSION.labels(self._policy).set(wait_s)
        SLOTS.labels(self._policy).set(known)
        if live.serving >= known and not self._was_warned:
            self._was_warned = True
            log.warning(
                "adapter_slots_too_few",
                slots=known,
                serving=live.serving,
                remedy="start the model server with a larger --max-loras, and set"
                " PAWL_ADAPTER_SLOTS to it",
            )
        if not is_free:
            waits_for = "trainer_waits_for_a_slot"
        else:
            waits_for = "trainer_waits_for_its_time" if wait_s > 0.0 else None
        if waits_for != self._told:
            self._told = waits_for
            log.info(
                waits_for or "trainer_has_a_slot",
                policy=self._policy,
                live=live.total,
                slots=known,
                due_in_s=round(wait_s),
            )
