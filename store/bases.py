"""The calls that later ones may be stored as additions to: the tips of recent threads.

Bounded memory of one drainer. Only calls whose rows are committed may be remembered; a call
whose base is not here is stored whole, so forgetting costs space and nothing else.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final
from uuid import UUID

from store.delta import LEAST_SHARED, delta, shared_prefix
from store.ids import day_of
from store.records import CallRecord, Record

CAPACITY_BYTES: Final = 64 * 2**20
# What Python takes for a tip beside its bytes, about.
OVERHEAD_BYTES: Final = 600
# Threads of one episode (agents that take turns) that are followed side by side.
TIPS: Final = 4


class Base(Record, frozen=True, kw_only=True):
    """A stored call: its ids, prompt and sampled, are what the next prompt may begin with."""

    call_id: UUID
    request: bytes
    prompt_ids: bytes
    sampled_ids: bytes
    offers: tuple[bytes, ...] = ()


class Stored(Record, frozen=True, kw_only=True):
    """How a call's request and prompt ids are written down."""

    parent_id: UUID | None = None
    request_prefix: int | None = None
    request_suffix: int | None = None
    prompt_prefix: int | None = None
    request: bytes | None
    prompt_ids: bytes


class Bases:
    """Tips by episode, the episodes least lately used forgotten first."""

    def __init__(self, capacity: int = CAPACITY_BYTES) -> None:
        self._capacity = capacity
        self._size = 0
        self._tips: OrderedDict[str, list[Base]] = OrderedDict()
        self._offered_by: dict[bytes, str] = {}

    def batch(self) -> "Batch":
        """A view in which the calls of one batch are bases of each other."""
        return Batch(self)

    def of(self, episode: str) -> list[Base]:
        """The tips of an episode."""
        return self._tips.get(episode, [])

    def asked_for(self, asks: Iterable[bytes]) -> list[Base]:
        """The tips of the first episode that offered what is asked for.

        A call without a name may have an episode of its own until the store joins it.
        """
        keys = (self._offered_by.get(digest) for digest in asks)
        key = next((key for key in keys if key is not None), None)
        return [] if key is None else self.of(key)

    def remember(self, episodes: Iterable[tuple[str, list[Base]]]) -> None:
        """Take the tips of these episodes as they are now."""
        for episode, tips in episodes:
            self._forget(self._tips.pop(episode, ()))
            self._tips[episode] = tips
            self._offered_by |= {digest: episode for tip in tips for digest in tip.offers}
            self._size += sum(map(_size, tips))
        while self._size > self._capacity:
            _, tips = self._tips.popitem(last=False)
            self._forget(tips)

    def _forget(self, tips: Iterable[Base]) -> None:
        tips = list(tips)
        self._size -= sum(map(_size, tips))
        for digest in (digest for tip in tips for digest in tip.offers):
            self._offered_by.pop(digest, None)


class Batch:
    """What one batch adds to the memory; kept apart until its rows are committed."""

    def __init__(self, bases: Bases) -> None:
        self._bases = bases
        self._tips: dict[str, list[Base]] = {}
        self._offered_by: dict[bytes, str] = {}

    def store(self, call: CallRecord) -> Stored:
        """How `call` is written down; it is a base for the calls that follow in the batch."""
        request, prompt_ids = call.request, call.tokens.prompt_ids
        whole = Stored(request=request, prompt_ids=prompt_ids)
        if request is None:
            return whole
        tips = self._tips.get(call.episode)
        if tips is None:
            tips = self._tips[call.episode] = list(self._bases.of(call.episode))
        base = _nearest(tips or self._asked_for(call), call)
        stored = whole if base is None else _added(base, request, prompt_ids)
        if base is not None and base in tips and _continues(stored, base):
            tips.remove(base)
        tips.append(
            Base(
                call_id=call.id,
                request=request,
                prompt_ids=prompt_ids,
                sampled_ids=call.tokens.sampled_ids,
                offers=call.offers,
            )
        )
        self._offered_by |= dict.fromkeys(call.offers, call.episode)
        del tips[:-TIPS]
        return stored

    def _asked_for(self, call: CallRecord) -> list[Base]:
        for digest in call.asks:
            if digest in self._offered_by:
                return self._tips[self._offered_by[digest]]
        return self._bases.asked_for(call.asks)

    def commit(self) -> None:
        """The batch's rows are committed: its calls may be bases."""
        self._bases.remember(self._tips.items())


def _nearest(tips: list[Base], call: CallRecord) -> Base | None:
    """The tip whose request begins most like the call's; of its day, as days are dropped whole."""
    if not tips:
        return None
    request, day = call.request or b"", day_of(call.id)
    of_its_day = [tip for tip in tips if day_of(tip.call_id) == day]
    if len(of_its_day) < 2:
        return of_its_day[0] if of_its_day else None
    return max(of_its_day, key=lambda tip: shared_prefix(tip.request, request))


def _continues(stored: Stored, base: Base) -> bool:
    """Whether next to nothing of the base is missing: then it need not be kept beside."""
    shared = (stored.request_prefix or 0) + (stored.request_suffix or 0)
    return len(base.request) - shared < LEAST_SHARED


def _added(base: Base, request: bytes, prompt_ids: bytes) -> Stored:
    prefix, suffix, middle = delta(base.request, request)
    if prefix + suffix < LEAST_SHARED:
        return Stored(request=request, prompt_ids=prompt_ids)
    shared = shared_prefix(base.prompt_ids + base.sampled_ids, prompt_ids)
    return Stored(
        parent_id=base.call_id,
        request_prefix=prefix,
        request_suffix=suffix,
        prompt_prefix=shared,
        request=middle,
        prompt_ids=prompt_ids[shared:],
    )


def _size(base: Base) -> int:
    return len(base.request) + len(base.prompt_ids) + len(base.sampled_ids) + OVERHEAD_BYTES
