"""Make no more versions than the model server has adapter slots for.

A server computes with a limited number of adapters at once (vLLM's `--max-loras`); requests for a
further adapter wait until those for another adapter have ended. A version that lost the traffic
gives its slot to the next version, unless episodes that began with it are under way. While such
episodes take all slots no update is claimed; new episodes wait for the next update.
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
from store.adapter_slots import LiveCounts, VersionKeptForEpisodes, free_slots, needed_slots
from trainer.errors import UpstreamAway
from trainer.metrics import ADAPTER_SLOTS, LIVE_VERSIONS
from trainer.publishing.model_server import ModelServer, Replicas
from trainer.recipes.recipe import Recipe
from trainer.settings import USUAL_SLOTS

log = structlog.get_logger()

# Seconds for which the reported number of slots is cached.
SLOTS_CACHED_S: Final = 60.0
_MAX_LORAS: Final = re.compile(r'^vllm:lora_requests_info\{[^}\n]*\bmax_lora="(\d+)"', re.MULTILINE)


def slots_named_in(metrics: str) -> int | None:
    """Return the number of adapter slots in vLLM's metrics; None before its first LoRA request."""
    match = _MAX_LORAS.search(metrics)
    return int(match[1]) if match else None


def slots_remedy(slots: int) -> str:
    """Return the remedy to recommend if `slots` adapter slots are too few."""
    return (
        f"set PAWL_ADAPTER_SLOTS={2 * slots} and start Pawl again: `pawl up`, Compose and the chart"
        f" start vLLM with it; start a vLLM of your own with --max-loras {2 * slots}"
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

        `together` are the policies that must go live together, this one included (empty: none).
        The first of their versions is not allowed until there are slots for all of them, for at
        most `publish.wait_for_others_s`. `clock` returns seconds. `known` are the configured
        policies (None: all); a serving version of any other takes no slot once nobody calls it.
        """
        self._servers = servers
        self._policy = policy
        self._rule = recipe.publish
        self._max_staleness = recipe.claim.max_staleness
        self._together = tuple(together)
        self._known_policies = known
        self._clock = clock
        # Slots that the servers reported last, and until when they are cached.
        self._reported_slots = USUAL_SLOTS
        self._cached_until = -inf
        # Since when there is a slot for one version, but not for all that go live together.
        self._short_since: float | None = None
        self._logged = False
        self._warned: set[str] = set()
        # Whether an update waits for a slot.
        self.waits = False

    async def allows_version(
        self, connection: AsyncConnection, is_wanted: Callable[[], Awaitable[bool]]
    ) -> bool:
        """Return whether one more version may be made; lock the slots until the transaction ends.

        `is_wanted` returns whether an update could be claimed now. Versions are unloaded to free
        slots only if it returns True.
        """
        slots, live = await self._lock_slots(connection)
        free, kept = free_slots(live, slots), list[VersionKeptForEpisodes]()
        if free < needed_slots(live, slots, len(self._together)):
            if not await is_wanted():
                self.waits = False
                return False
            kept = await adapter_slots.versions_kept_for_episodes(connection, self._policy)
        unloadable = [version for version in kept if version.may_be_unloaded]
        needed = self._needed_slots(live, slots, free + len(unloadable))
        self.waits = free + len(unloadable) < needed
        if not self.waits:
            await _unload_for_slot(connection, unloadable[: max(0, needed - free)])
        self._show_wait(live, slots, kept)
        return not self.waits

    async def has_test_slot(self, connection: AsyncConnection) -> bool:
        """Return whether there is a slot for a self-test's adapter, which is loaded for a moment.

        If all are taken, versions that may be unloaded make room. No slot is reserved. Versions
        that are being made take no slot yet: they are loaded later.
        """
        slots, live = await self._lock_slots(connection)
        missing = 1 - free_slots(msgspec.structs.replace(live, coming=0), slots)
        kept = (
            await adapter_slots.versions_kept_for_episodes(connection, self._policy)
            if missing > 0
            else []
        )
        unloadable = [version for version in kept if version.may_be_unloaded]
        await _unload_for_slot(connection, unloadable[: max(0, missing)])
        return len(unloadable) >= missing

    async def _lock_slots(self, connection: AsyncConnection) -> tuple[int, LiveCounts]:
        """Lock the slots until the transaction ends; return their number, and the live counts."""
        slots = await self._slot_count()
        await adapter_slots.lock_slots(connection, self._policy)
        live = await adapter_slots.count_live_versions(
            connection, self._policy, self._together, self._known_policies
        )
        self._warn_of_settings(live, slots)
        LIVE_VERSIONS.labels(self._policy).set(live.total)
        ADAPTER_SLOTS.labels(self._policy).set(slots)
        return slots, live

    def _needed_slots(self, live: LiveCounts, slots: int, free: int) -> int:
        """Return how many slots must be free for the next version.

        These are slots for all policies that go live together. After `publish.wait_for_others_s`
        one is enough: other policies may take each slot that becomes free.
        """
        needed = needed_slots(live, slots, len(self._together))
        if not 0 < free < needed:
            self._short_since = None
            return needed
        if self._short_since is None:
            self._short_since = self._clock()
        has_waited = self._clock() - self._short_since >= self._rule.wait_for_others_s
        return 1 if has_waited else needed

    async def _slot_count(self) -> int:
        """Return the number of slots: configured, else the smallest that a replica reports, else 8.

        Once all replicas have reported, the number is cached for `SLOTS_CACHED_S` seconds: a server
        may restart with another number.
        """
        if self._servers.slots is not None:
            return self._servers.slots
        now = self._clock()
        if now < self._cached_until:
            return self._reported_slots
        try:
            metrics = (await self._servers.ask(ModelServer.metrics)).values()
        except UpstreamAway:
            # Training needs no model server; the next call asks again.
            return self._reported_slots
        of_servers = [slots for slots in map(slots_named_in, metrics) if slots is not None]
        self._reported_slots = min(of_servers, default=USUAL_SLOTS)
        if len(of_servers) == len(self._servers.each):
            self._cached_until = now + SLOTS_CACHED_S
        return self._reported_slots

    def _warn_of_settings(self, live: LiveCounts, slots: int) -> None:
        """Warn, once for each, of settings that do not fit the number of slots."""
        if live.serving + live.held >= slots:
            self._warn_once(
                "adapter_slots_too_few",
                slots_remedy(slots),
                slots=slots,
                serving=live.serving,
            )
        if self._max_staleness < 2 * slots:
            self._warn_once(
                "max_staleness_too_small",
                f"set claim.max_staleness to {2 * slots} at least: so many versions may be made"
                " during one episode, which would then expire untrained",
                slots=slots,
                max_staleness=self._max_staleness,
            )

    def _warn_once(self, event: str, remedy: str, **values: int) -> None:
        if event not in self._warned:
            self._warned.add(event)
            log.warning(event, policy=self._policy, remedy=remedy, **values)

    def _show_wait(
        self, live: LiveCounts, slots: int, kept: Sequence[VersionKeptForEpisodes]
    ) -> None:
        """Log when a wait for a slot begins, with the episodes it is for, and when it ends."""
        if self.waits == self._logged:
            return
        self._logged = self.waits
        fields: dict[str, object] = {"policy": self._policy, "live": live.total, "slots": slots}
        if self.waits:
            fields["episodes_under_way"] = [
                version.served_name for version in kept if not version.may_be_unloaded
            ]
            fields["at_most_s"] = round(min((version.at_most_s for version in kept), default=0.0))
        log.info("trainer_waits_for_a_slot" if self.waits else "trainer_has_a_slot", **fields)


async def _unload_for_slot(
    connection: AsyncConnection, versions: Sequence[VersionKeptForEpisodes]
) -> None:
    await adapter_slots.unload_kept_versions(connection, versions, "its slot is needed", "trainer")
    for version in versions:
        log.info(
            "version_unloaded_for_slot",
            version=version.served_name,
            is_used=version.is_under_way,
        )
