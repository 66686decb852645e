"""Joins: decide which recorded episodes are one (pure), independent of the order of arrival.

A call that the proxy could not join asks for fingerprints of what it repeats. A link states
that an episode offers one of them. The rules (docs/decisions/011-joins-in-the-store.md):

- An ask that one episode answers joins the two episodes.
- An ask that two different episodes answer is doubtful: it joins nothing, and all episodes that
  it touches are excluded from training. If other asks show that the two are one episode, the
  doubt is gone.
- A fingerprint that more than `MOST_OFFERING` episodes offer is worn, that is, too common: it is
  no evidence about any of them. This also limits the work of a join.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final
from uuid import UUID

from store.records import Confidence, Record

MOST_OFFERING: Final = 8

DOUBTFUL_CALL = "a call was put into this episode in doubt"
DOUBTFUL_ASK = "a call repeats what more than one episode was told"
TOLD_MORE_THAN_ONE = "a call that repeats what this episode was told may belong to another"
TOO_LATE = "the episode that this one continues was claimed before it was known"

# Method and confidence of a join, by the level of the ask (`store.values.digests.levels`).
_JOINED_BY: tuple[tuple[str, Confidence], ...] = (("tool_call", "certain"), ("response", "certain"))
_BY_PREFIX: tuple[str, Confidence] = ("prefix", "likely")


class Part(Record, frozen=True, kw_only=True):
    """An episode made of the calls under its own key only, before joins.

    `held` is true if it was claimed, by itself or as a part of another.
    """

    id: UUID
    first_call_id: UUID
    task: str | None
    task_named: bool
    task_from: UUID | None
    doubtful: bool
    held: bool


class Link(Record, frozen=True, kw_only=True):
    """A match: a call of episode `asked_by` repeats something that episode `offered_by` offers."""

    call_id: UUID
    level: int
    asked_by: UUID
    offered_by: UUID


class Place(Record, frozen=True, kw_only=True):
    """The result for a part. `root` is None if the part itself stands for the whole episode."""

    root: UUID | None = None
    joined_task: str | None = None
    quarantined_reason: str | None = None


class Joins(Record, frozen=True, kw_only=True):
    """The place of each part, and each asking call's method and confidence (None: not joined)."""

    places: Mapping[UUID, Place]
    calls: Mapping[UUID, tuple[str, Confidence] | None]


def resolve(parts: Sequence[Part], links: Iterable[Link]) -> Joins:
    """Join the parts that are one episode. Parts that are held get no place: they stay as is."""
    asks = _surest(links)
    roots = {part.id: part.id for part in parts}
    _unite(roots, asks)
    doubts: dict[UUID, str] = {part.id: DOUBTFUL_CALL for part in parts if part.doubtful}
    joined: dict[UUID, tuple[str, Confidence] | None] = {}
    for call_id, (level, asked_by, offered_by) in asks.items():
        worn = len(offered_by) > MOST_OFFERING
        if not worn and len({_root(roots, offered) for offered in offered_by}) == 1:
            joined[call_id] = _JOINED_BY[level] if level < len(_JOINED_BY) else _BY_PREFIX
            continue
        joined[call_id] = None
        doubts.setdefault(asked_by, DOUBTFUL_ASK)
        for offered in () if worn else offered_by:
            doubts.setdefault(offered, TOLD_MORE_THAN_ONE)
    by_root: dict[UUID, list[Part]] = {}
    for part in parts:
        by_root.setdefault(_root(roots, part.id), []).append(part)
    places: dict[UUID, Place] = {}
    for members in by_root.values():
        places |= _places(members, doubts)
    late = {part for part, place in places.items() if place.quarantined_reason == TOO_LATE}
    held = {part.id for part in parts if part.held}
    for call_id, (_, asked_by, _) in asks.items():
        if asked_by in late:
            joined[call_id] = None
        elif asked_by in held:
            del joined[call_id]
    return Joins(places=places, calls=joined)


def _surest(links: Iterable[Link]) -> dict[UUID, tuple[int, UUID, list[UUID]]]:
    """Return each call's level, own episode and offering episodes, of its lowest level only.

    The order is stable.
    """
    asks: dict[UUID, tuple[int, UUID, list[UUID]]] = {}
    for link in sorted(links, key=lambda link: (link.call_id, link.level, link.offered_by)):
        level, _, offered_by = asks.setdefault(link.call_id, (link.level, link.asked_by, []))
        if level == link.level:
            offered_by.append(link.offered_by)
    return asks


def _unite(roots: dict[UUID, UUID], asks: Mapping[UUID, tuple[int, UUID, list[UUID]]]) -> None:
    """Join until nothing changes. A join may resolve the doubt of another ask, never cause one."""
    changed = True
    while changed:
        changed = False
        for _, asked_by, offered_by in asks.values():
            if len(offered_by) > MOST_OFFERING:
                continue
            candidates = {_root(roots, part) for part in offered_by}
            own = _root(roots, asked_by)
            if len(candidates) == 1 and own not in candidates:
                roots[own] = candidates.pop()
                changed = True


def _root(roots: dict[UUID, UUID], part: UUID) -> UUID:
    while roots[part] != part:
        roots[part] = part = roots[roots[part]]
    return part


def _places(members: list[Part], doubts: Mapping[UUID, str]) -> dict[UUID, Place]:
    """Return the places of one episode's parts; the earliest part stands for the episode."""
    if any(part.held for part in members):
        return {part.id: Place(quarantined_reason=TOO_LATE) for part in members if not part.held}
    ordered = sorted(members, key=lambda part: (part.first_call_id, part.id))
    first, *others = ordered
    reason = next((doubts[part.id] for part in ordered if part.id in doubts), None)
    places = {part.id: Place(root=first.id, quarantined_reason=reason) for part in others}
    task = _task(members)
    task = None if task == first.task else task
    return places | {first.id: Place(joined_task=task, quarantined_reason=reason)}


def _task(members: list[Part]) -> str | None:
    """Choose the task as within a part: named before derived, then the earliest."""
    having = [(not part.task_named, part.task_from, part) for part in members if part.task_from]
    return min(having, key=lambda one: one[:2])[2].task if having else None
