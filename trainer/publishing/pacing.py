"""Make no more versions than the model server has adapter slots for.

A server computes with a limited number of adapters at once (vLLM's `--max-loras`); requests of one
more adapter wait until another's have ended. A version that lost the traffic gives its slot to the
next version, unless episodes of it are under way. While such episodes take all slots no update is
claimed; new episodes wait for the next update.
"""

import re
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from time import monotonic
from typing import Final

import msgspec
import structlog
from sqlalchemy.ext.asyncio import AsyncConnection

from store import adapter_slots
from store.adapter_slots import KeptVersion, LiveCounts, free_slots, needed_slots
from trainer.errors import UpstreamAway
from trainer.metrics import LIVE, SLOTS
from trainer.publishing.model_server import ModelServer, Replicas
from trainer.recipes.recipe import Recipe
from trainer.settings import USUAL_SLOTS

log = structlog.get_logger()

# Seconds for which the reported number of slots is cached.
KNOWN_S: Final = 60.0
_MAX_LORAS: Final = re.compile(r'^vllm:lora_requests_info\{[^}\n]*\bmax_lora="(\d+)"', re.MULTILINE)


def slots_named_in(metrics: str) -> int | None:
    """Return the adapter slots that vLLM's metrics name, or None before its first LoRA request."""
    match = _MAX_LORAS.search(metrics)
    return int(match[1]) if match else None


def slots_remedy(slots: int) -> str:
    """Return the remedy where `slots` adapter slots are too few."""
    return (
        f"set PAWL_ADAPTER_SLOTS={2 * slots} and start Pawl again: `pawl up`, Compose and the chart"
        f" start vLLM with it; start one of your own with --max-loras {2 * slots}"
    )


class Pacing:
    """Decide whether a policy's next version may be made."""

    def __init__(
        self,
        servers: Replicas,
        policy: str,
        recipe: Recipe,
        together: Sequence[str] = (),
        clock: Callable[[], float] = monotonic,
        known: Sequence[str] | None = None,
    ) -> None:
        """Store the model servers, the policy's name and the recipe's limits.

        `together` are the policies that must go live together, this one included (empty: none);
        their first version waits for room for all, up to `publish.wait_for_others_s`. `clock`
        returns seconds. `known` are the configured policies (None: all): another policy's serving
        version takes no slot once nobody calls it.
        """
        self._servers = servers
        self._policy = policy
        self._rule = recipe.publish
        self._max_staleness = recipe.claim.max_staleness
        self._together = tuple(together)
        self._known_policies = known
        self._clock = clock
        # Slots that the servers reported last, and until when they are cached.
        self._named = USUAL_SLOTS
        self._known_until = -inf
        # Since when there is room for one version, but not for all that go live together.
        self._short_since: float | None = None
        self._logged = False
        self._warned: set[str] = set()
        # Whether an update waits for a slot.
        self.waits = False

    async def allows_version(
        self, connection: AsyncConnection, is_wanted: Callable[[], Awaitable[bool]]
    ) -> bool:
        """Return whether one more version may be made; the slots are locked until a commit.

        `is_wanted` returns whether an update could be claimed now; only then versions are unloaded.
        """
        known, live = await self._lock_slots(connection)
        free, kept = free_slots(live, known), list[KeptVersion]()
        if free < needed_slots(live, known, len(self._together)):
            if not await is_wanted():
                self.waits = False
                return False
            kept = await adapter_slots.kept_versions(connection, self._policy)
        giving = [version for version in kept if version.may_be_unloaded]
        needed = self._needed_slots(live, known, free + len(giving))
        self.waits = free + len(giving) < needed
        if not self.waits:
            await _unload_kept(connection, giving[: max(0, needed - free)])
        self._show_wait(live, known, kept)
        return not self.waits

    async def has_test_slot(self, connection: AsyncConnection) -> bool:
        """Return whether there is a slot for the adapter of a self-test, loaded for a moment.

        No slot is reserved. Versions that are being made do not count: they are loaded later.
        """
        known, live = await self._lock_slots(connection)
        missing = 1 - free_slots(msgspec.structs.replace(live, coming=0), known)
        kept = await adapter_slots.kept_versions(connection, self._policy) if missing > 0 else []
        giving = [version for version in kept if version.may_be_unloaded]
        await _unload_kept(connection, giving[: max(0, missing)])
        return len(giving) >= missing

    async def _lock_slots(self, connection: AsyncConnection) -> tuple[int, LiveCounts]:
        """Return the number of slots and the versions that need one; lock slots until a commit."""
        known = await self._known_slots()
        await adapter_slots.lock_slots(connection, self._policy)
        live = await adapter_slots.count_live_versions(
            connection, self._policy, self._together, self._known_policies
        )
        self._warn_of_settings(live, known)
        LIVE.labels(self._policy).set(live.total)
        SLOTS.labels(self._policy).set(known)
        return known, live

    def _needed_slots(self, live: LiveCounts, known: int, free: int) -> int:
        """Return how many slots must be free; one after a long enough wait for partners' slots.

        Other policies may take each slot as soon as it is free, so the wait must end.
        """
        needed = needed_slots(live, known, len(self._together))
        if not 0 < free < needed:
            self._short_since = None
            return needed
        if self._short_since is None:
            self._short_since = self._clock()
        has_waited = self._clock() - self._short_since >= self._rule.wait_for_others_s
        return 1 if has_waited else needed

    async def _known_slots(self) -> int:
        """Return the fewest slots that a replica reports, or the usual number before any did.

        A server may restart with another number, so they are asked again every `KNOWN_S`, and each
        time until all have reported.
        """
        if self._servers.slots is not None:
            return self._servers.slots
        now = self._clock()
        if now < self._known_until:
            return self._named
        try:
            metrics = (await self._servers.ask(ModelServer.metrics)).values()
        except UpstreamAway:
            # Training needs no model server; the next call asks again.
            return self._named
        of_servers = [slots for slots in map(slots_named_in, metrics) if slots is not None]
        self._named = min(of_servers, default=USUAL_SLOTS)
        if len(of_servers) == len(self._servers.each):
            self._known_until = now + KNOWN_S
        return self._named

    def _warn_of_settings(self, live: LiveCounts, known: int) -> None:
        """Log, once each, settings that do not fit the server."""
        if live.serving + live.held >= known:
            self._warn_once(
                "adapter_slots_too_few",
                slots_remedy(known),
                slots=known,
                serving=live.serving,
            )
        if self._max_staleness < 2 * known:
            self._warn_once(
                "max_staleness_too_small",
                f"set claim.max_staleness to {2 * known} at least: as many versions may be made"
                " while an episode goes on, and it would expire untrained",
                slots=known,
                max_staleness=self._max_staleness,
            )

    def _warn_once(self, event: str, remedy: str, **values: int) -> None:
        if event not in self._warned:
            self._warned.add(event)
            log.warning(event, policy=self._policy, remedy=remedy, **values)

    def _show_wait(self, live: LiveCounts, known: int, kept: Sequence[KeptVersion]) -> None:
        """Log when the trainer begins to wait for a slot (and for which episodes), and the end."""
        if self.waits == self._logged:
            return
        self._logged = self.waits
        slots: dict[str, object] = {"policy": self._policy, "live": live.total, "slots": known}
        if self.waits:
            slots["episodes_under_way"] = [
                one.served_name for one in kept if not one.may_be_unloaded
            ]
            slots["at_most_s"] = round(min((one.at_most_s for one in kept), default=0.0))
        log.info("trainer_waits_for_a_slot" if self.waits else "trainer_has_a_slot", **slots)


async def _unload_kept(connection: AsyncConnection, going: Sequence[KeptVersion]) -> None:
    await adapter_slots.unload_kept(connection, going, "its slot is needed", "trainer")
    for one in going:
        log.info("version_unloaded_for_slot", version=one.served_name, is_used=one.is_under_way)
