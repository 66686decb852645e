"""Cache the newest calls of recent threads, the tips: later calls may be stored as additions.

Each drainer has a cache of limited size. It holds calls whose rows are committed, or belong to the
current transaction: a failed transaction leaves an empty cache. A call whose base is not in it is
stored whole, so a missing entry costs disk space and nothing else.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final
from uuid import UUID

from store.ids import day_of
from store.records import CallRecord, Record
from store.values.packing import LEAST_SHARED_BYTES, delta, shared_prefix

CAPACITY_BYTES: Final = 64 * 2**20
# Approximate memory that Python uses for a tip in addition to its bytes.
OVERHEAD_BYTES: Final = 600
# Number of threads of one episode (agents that take turns) that are followed side by side.
MOST_TIPS: Final = 4


class BaseCall(Record, frozen=True, kw_only=True):
    """A stored call, whose prompt and sampled ids its thread's next prompt may repeat."""

    call_id: UUID
    request: bytes
    prompt_ids: bytes
    sampled_ids: bytes
    provides: tuple[bytes, ...] = ()


class StoredTexts(Record, frozen=True, kw_only=True):
    """A call's columns for request and prompt ids, whole or as an addition.

    With a `parent_id`, `request` and `prompt_ids` hold only the bytes that the call adds;
    `request_prefix`, `request_suffix` and `prompt_prefix` count the bytes taken from the parent.
    """

    parent_id: UUID | None = None
    request_prefix: int | None = None
    request_suffix: int | None = None
    prompt_prefix: int | None = None
    request: bytes | None
    prompt_ids: bytes


class BaseCache:
    """Cache of the tips (newest calls) of threads; the episode updated longest ago goes first."""

    def __init__(self, capacity: int = CAPACITY_BYTES) -> None:
        """Open an empty cache of at most `capacity` bytes."""
        self._capacity = capacity
        self._size = 0
        self._tips: OrderedDict[str, list[BaseCall]] = OrderedDict()
        self._provided_by: dict[bytes, str] = {}

    def store(self, call: CallRecord) -> StoredTexts:
        """Return the columns to store `call` with, and cache it as a base for later calls."""
        request, prompt_ids = call.request, call.tokens.prompt_ids
        whole = StoredTexts(request=request, prompt_ids=prompt_ids)
        if request is None:
            return whole
        tips = list(self.tips_of(call.episode))
        base = _nearest(tips or self._tips_for_needs(call.needs), call)
        stored = whole if base is None else _as_addition(base, request, prompt_ids)
        if base is not None and base in tips:
            shared = (stored.request_prefix or 0) + (stored.request_suffix or 0)
            # A call that repeats nearly all of its base replaces it as a tip.
            if len(base.request) - shared < LEAST_SHARED_BYTES:
                tips.remove(base)
        tips.append(
            BaseCall(
                call_id=call.id,
                request=request,
                prompt_ids=prompt_ids,
                sampled_ids=call.tokens.sampled_ids,
                provides=call.provides,
            )
        )
        self._remember(call.episode, tips[-MOST_TIPS:])
        return stored

    def tips_of(self, episode: str) -> list[BaseCall]:
        """Return an episode's recent calls that no later call extends."""
        return self._tips.get(episode, [])

    def _tips_for_needs(self, needs: Iterable[bytes]) -> list[BaseCall]:
        """Return the tips of the episode that provided the first known fingerprint of `needs`.

        A call that names no episode may have one of its own until the store joins it.
        """
        keys = (self._provided_by.get(digest) for digest in needs)
        key = next((key for key in keys if key is not None), None)
        return [] if key is None else self.tips_of(key)

    def _remember(self, episode: str, tips: list[BaseCall]) -> None:
        """Replace the tips of an episode, and evict other episodes above the capacity."""
        self._forget(self._tips.pop(episode, ()))
        self._tips[episode] = tips
        self._provided_by |= {digest: episode for tip in tips for digest in tip.provides}
        self._size += sum(map(_size, tips))
        while self._size > self._capacity:
            _, evicted = self._tips.popitem(last=False)
            self._forget(evicted)

    def _forget(self, tips: Iterable[BaseCall]) -> None:
        tips = list(tips)
        self._size -= sum(map(_size, tips))
        for digest in (digest for tip in tips for digest in tip.provides):
            self._provided_by.pop(digest, None)


def _nearest(tips: list[BaseCall], call: CallRecord) -> BaseCall | None:
    """Return the tip of the call's day that shares the longest request prefix with it.

    Partitions are dropped by day, so a call must not depend on one of another day.
    """
    if not tips:
        return None
    request, day = call.request or b"", day_of(call.id)
    of_its_day = [tip for tip in tips if day_of(tip.call_id) == day]
    if len(of_its_day) < 2:
        return of_its_day[0] if of_its_day else None
    return max(of_its_day, key=lambda tip: shared_prefix(tip.request, request))


def _as_addition(base: BaseCall, request: bytes, prompt_ids: bytes) -> StoredTexts:
    prefix, suffix, middle = delta(base.request, request)
    if prefix + suffix < LEAST_SHARED_BYTES:
        return StoredTexts(request=request, prompt_ids=prompt_ids)
    shared = shared_prefix(base.prompt_ids + base.sampled_ids, prompt_ids)
    return StoredTexts(
        parent_id=base.call_id,
        request_prefix=prefix,
        request_suffix=suffix,
        prompt_prefix=shared,
        request=middle,
        prompt_ids=prompt_ids[shared:],
    )


def _size(base: BaseCall) -> int:
    return len(base.request) + len(base.prompt_ids) + len(base.sampled_ids) + OVERHEAD_BYTES
