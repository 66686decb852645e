"""Make no more versions than the model server has adapter slots for.

A server computes with so many adapters at once (vLLM's `--max-loras`); requests of one more wait
until another's have ended. A version needs its slot for as long as its episodes may call. So
while all are taken no update is claimed: its episodes wait, and the version that it will make
builds on what was learned meanwhile.
"""

import re
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from time import monotonic
from typing import Final

import structlog
from sqlalchemy.ext.asyncio import AsyncConnection

from store import adapter_slots
from store.adapter_slots import Live, due_in, free_slots, needed_slots
from store.version_states import mark_unloaded
from trainer.errors import UpstreamAway
from trainer.metrics import LIVE, SLOTS
from trainer.publishing.model_server import ModelServer, Replicas
from trainer.publishing.publisher import PROXY_REFRESH_S
from trainer.recipes.recipe import Recipe
from trainer.settings import USUAL_SLOTS

log = structlog.get_logger()

# How long what the model servers name is taken as known.
KNOWN_S: Final = 60.0
_MAX_LORAS: Final = re.compile(r'^vllm:lora_requests_info\{[^}\n]*\bmax_lora="(\d+)"', re.MULTILINE)


def slots_named_in(metrics: str) -> int | None:
    """Return the adapter slots that vLLM's metrics name, or None before its first LoRA request."""
    match = _MAX_LORAS.search(metrics)
    return int(match[1]) if match else None


async def named_slots(servers: Replicas) -> list[int]:
    """Return the adapter slots of the replicas that answer, as far as they name them."""
    texts = (await servers.ask(ModelServer.metrics)).values()
    return [number for number in map(slots_named_in, texts) if number is not None]


async def fewest_slots(servers: Replicas) -> int:
    """Return the adapter slots that each replica has: as configured, as they say, or as usual.

    Raises:
        UpstreamAway: it is not configured, and none answers.
    """
    if servers.slots is not None:
        return servers.slots
    return min(await named_slots(servers), default=USUAL_SLOTS)


# Where all slots are taken, a version that lost the traffic so many seconds ago is unloaded for the
# next; its episodes go on with the version that serves.
LONGEST_PIN_S: Final = 3600.0


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
        """Store the model servers, the policy's name and the recipe, whose bounds are kept.

        `together` are the policies that must go live together, this one among them, if any must;
        the first version of theirs waits for room for all, up to `publish.wait_for_others_s`.
        `clock` returns seconds. `known` are the configured policies (None: all are): what serves
        for others takes no slot once nobody calls it.
        """
        self._servers = servers
        self._policy = policy
        self._rule = recipe.publish
        self._max_staleness = recipe.claim.max_staleness
        self._together = tuple(together)
        self._known_policies = known
        self._clock = clock
        # What the servers named last, and until when that is taken as known.
        self._named = USUAL_SLOTS
        self._known_until = -inf
        # Since when there is room for one, and not for all that go live together.
        self._short_since: float | None = None
        self._logged: str | None = None
        self._warned: set[str] = set()
        # Whether the last look allowed no update.
        self.waits = False

    async def allows(
        self, connection: AsyncConnection, is_wanted: Callable[[], Awaitable[bool]]
    ) -> bool:
        """Return whether one more version may be made; no other takes a slot until a commit.

        `is_wanted` tells whether an update could be claimed now: for that alone is any version
        unloaded.
        """
        known, live = await self._look(connection)
        free, needed = free_slots(live, known), self._needed(live, known)
        if free + live.unloading < needed:
            await self._unload_longest(connection, is_wanted)
        wait_s = due_in(live, known)
        self._warn(live, known)
        self._show(live, known, wait_s, is_free=free >= needed)
        self.waits = free < needed or wait_s > 0.0
        return not self.waits

    async def has_room(self, connection: AsyncConnection) -> bool:
        """Return whether there is a slot for the adapter of a self-test, loaded for a moment.

        None is reserved: an update that is claimed meanwhile comes with its version later. One that
        lost the traffic long ago is unloaded for it.
        """
        known, live = await self._look(connection)
        if free_slots(live, known) + live.unloading < 1:
            await self._unload_longest(connection, _always)
        return free_slots(live, known) >= 1

    async def _look(self, connection: AsyncConnection) -> tuple[int, Live]:
        """Return how many slots there are and what needs one; no other takes one until a commit."""
        known = await self._known()
        await adapter_slots.lock_slots(connection, self._policy)
        live = await adapter_slots.live_versions(
            connection,
            self._policy,
            PROXY_REFRESH_S,
            LONGEST_PIN_S,
            self._together,
            self._known_policies,
        )
        return known, live

    def _needed(self, live: Live, known: int) -> int:
        """Return how many slots must be free: one, once partners' were waited for long enough.

        Others may take each slot as soon as it is free, and nobody may wait for ever.
        """
        needed = needed_slots(live, known, len(self._together))
        if not 0 < free_slots(live, known) < needed:
            self._short_since = None
            return needed
        if self._short_since is None:
            self._short_since = self._clock()
        has_waited = self._clock() - self._short_since >= self._rule.wait_for_others_s
        return 1 if has_waited else needed

    async def _known(self) -> int:
        """Return the fewest slots that a replica names, or the usual number before any did.

        A server may be started again with another number, so they are asked now and then; at each
        look, until all have named one.
        """
        if self._servers.slots is not None:
            return self._servers.slots
        now = self._clock()
        if now < self._known_until:
            return self._named
        try:
            of_servers = await named_slots(self._servers)
        except UpstreamAway:
            # They are asked again; training needs no model server.
            return self._named
        self._named = min(of_servers, default=USUAL_SLOTS)
        if len(of_servers) == len(self._servers.each):
            self._known_until = now + KNOWN_S
        return self._named

    async def _unload_longest(
        self, connection: AsyncConnection, is_wanted: Callable[[], Awaitable[bool]]
    ) -> None:
        longest = await adapter_slots.longest_kept(connection, self._policy, LONGEST_PIN_S)
        if longest is None or not await is_wanted():
            return
        why = f"its slot is needed, and it lost the traffic more than {LONGEST_PIN_S:g} s ago"
        await mark_unloaded(connection, longest.name, [longest.version], why, "trainer")
        log.warning(
            "version_unloaded_for_its_slot", version=longest.served_name, after_s=LONGEST_PIN_S
        )

    def _warn(self, live: Live, known: int) -> None:
        """Log once each what settings do not fit the server."""
        if live.serving + live.held >= known:
            self._warn_once(
                "adapter_slots_too_few",
                "start the model server with a larger --max-loras, and set PAWL_ADAPTER_SLOTS to"
                " it",
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

    def _show(self, live: Live, known: int, wait_s: float, *, is_free: bool) -> None:
        """Show the slots, and log when the trainer begins to wait for one or for its time."""
        LIVE.labels(self._policy).set(live.total)
        SLOTS.labels(self._policy).set(known)
        waits_for: str | None
        if not is_free:
            waits_for = "trainer_waits_for_a_slot"
        else:
            waits_for = "trainer_waits_for_its_time" if wait_s > 0.0 else None
        if waits_for != self._logged:
            self._logged = waits_for
            log.info(
                waits_for or "trainer_has_a_slot",
                policy=self._policy,
                live=live.total,
                slots=known,
                due_in_s=round(wait_s),
            )


async def _always() -> bool:
    return True
