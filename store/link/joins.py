"""Decide which recorded episodes are one (pure), independent of the order of arrival.

A call that the proxy could not join needs fingerprints of the content that it repeats. A link
states that an episode provides one of them. The rules (docs/decisions/012-identity.md):

- If one episode provides what a call needs, that episode and the call's are joined.
- If two different episodes provide it, the need is doubtful: it joins nothing, and all these
  episodes are excluded from training. If other needs show that the two are one episode, the doubt
  is gone.
- An episode is evaluation if one of its parts is. Any match within a split is surer than a match
  across splits (`store.values.digests`), and a doubt across splits excludes the needing episode
  alone.
- A fingerprint that more than `MOST_PROVIDERS` episodes provide is too common: it is no evidence
  about any of them. This also limits the work of a join.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final
from uuid import UUID

from store.records import EVAL, TRAIN, Confidence, Record, Split
from store.values.digests import ACROSS_SPLITS

MOST_PROVIDERS: Final = 8

DOUBTFUL_CALL = "a call was joined to this episode in doubt"
DOUBTFUL_NEED = "a call matches several episodes"
AMBIGUOUS_MATCH = "a call that matches this episode may belong to another"
TOO_LATE = "the episode that this one continues was claimed before their link was known"

# Method and confidence of a join, by the level of the need (`store.values.digests.digest_levels`).
_JOINED_BY: tuple[tuple[str, Confidence], ...] = (("tool_call", "certain"), ("response", "certain"))
_BY_PREFIX: tuple[str, Confidence] = ("prefix", "likely")


class EpisodePart(Record, frozen=True, kw_only=True):
    """An episode before joins, with only the calls under its own key.

    `held`: it was claimed for a policy, by itself or as a part of another, or it was deleted.
    `root` is the episode that it was a part of so far.
    """

    id: UUID
    first_call_id: UUID
    task: str | None
    task_named: bool
    task_from: UUID | None
    doubtful: bool
    held: bool
    split: Split = TRAIN
    root: UUID | None = None


class Link(Record, frozen=True, kw_only=True):
    """A match: episode `needed_by` needs a fingerprint that episode `provided_by` provides.

    `call_id` is the call that needs it. The lower `level`, the surer the match.
    """

    call_id: UUID
    level: int
    needed_by: UUID
    provided_by: UUID


class PartPlace(Record, frozen=True, kw_only=True):
    """The episode `root` that a part belongs to; None if the part itself stands for the whole.

    `joined_task` is the whole's task, None if it is the part's own.
    """

    root: UUID | None = None
    joined_task: str | None = None
    quarantined_reason: str | None = None


class Joins(Record, frozen=True, kw_only=True):
    """Result of `resolve_joins`: the place of each part, and how each needing call was joined.

    `calls` have method and confidence; None: not joined. `evaluation` are the parts, held ones too,
    of episodes with a part in the `eval` split.
    """

    places: Mapping[UUID, PartPlace]
    calls: Mapping[UUID, tuple[str, Confidence] | None]
    evaluation: frozenset[UUID] = frozenset()


def resolve_joins(parts: Sequence[EpisodePart], links: Iterable[Link]) -> Joins:
    """Decide which parts are one episode. Held parts get no place: they stay as they are."""
    needs = _needs_by_call(links)
    roots = {part.id: part.id for part in parts}
    _unite(roots, needs)
    doubts: dict[UUID, str] = {part.id: DOUBTFUL_CALL for part in parts if part.doubtful}
    joined: dict[UUID, tuple[str, Confidence] | None] = {}
    for call_id, (level, needed_by, provided_by) in needs.items():
        too_common = len(provided_by) > MOST_PROVIDERS
        if not too_common and len({_root(roots, provided) for provided in provided_by}) == 1:
            kind = level % ACROSS_SPLITS
            joined[call_id] = _JOINED_BY[kind] if kind < len(_JOINED_BY) else _BY_PREFIX
            continue
        joined[call_id] = None
        doubts.setdefault(needed_by, DOUBTFUL_NEED)
        for provided in () if too_common or level >= ACROSS_SPLITS else provided_by:
            doubts.setdefault(provided, AMBIGUOUS_MATCH)
    by_root: dict[UUID, list[EpisodePart]] = {}
    for part in parts:
        by_root.setdefault(_root(roots, part.id), []).append(part)
    places: dict[UUID, PartPlace] = {}
    for joined_parts in by_root.values():
        places |= _places(joined_parts, doubts)
    late = {part for part, place in places.items() if place.quarantined_reason == TOO_LATE}
    held = {part.id for part in parts if part.held}
    for call_id, (_, needed_by, _) in needs.items():
        if needed_by in late:
            joined[call_id] = None
        elif needed_by in held:
            del joined[call_id]
    return Joins(places=places, calls=joined, evaluation=_evaluation_parts(parts, roots))


def _evaluation_parts(parts: Sequence[EpisodePart], roots: dict[UUID, UUID]) -> frozenset[UUID]:
    """Return the parts of episodes with a part in `eval`; a held part is still part of its root."""
    for part in parts:
        if part.held and part.root is not None:
            roots[_root(roots, part.id)] = _root(roots, part.root)
    own = {_root(roots, part.id) for part in parts if part.split == EVAL}
    return frozenset(part.id for part in parts if _root(roots, part.id) in own)


def _needs_by_call(links: Iterable[Link]) -> dict[UUID, tuple[int, UUID, list[UUID]]]:
    """Return, by call, the level of its surest links, its episode, and the episodes they lead to.

    Calls are in the order of their ids.
    """
    needs: dict[UUID, tuple[int, UUID, list[UUID]]] = {}
    for link in sorted(links, key=lambda link: (link.call_id, link.level, link.provided_by)):
        level, _, provided_by = needs.setdefault(link.call_id, (link.level, link.needed_by, []))
        if level == link.level:
            provided_by.append(link.provided_by)
    return needs


def _unite(roots: dict[UUID, UUID], needs: Mapping[UUID, tuple[int, UUID, list[UUID]]]) -> None:
    """Join episodes in `roots` until nothing changes.

    A join may resolve the doubt of another need, never cause one.
    """
    changed = True
    while changed:
        changed = False
        for _, needed_by, provided_by in needs.values():
            if len(provided_by) > MOST_PROVIDERS:
                continue
            candidates = {_root(roots, part) for part in provided_by}
            own = _root(roots, needed_by)
            if len(candidates) == 1 and own not in candidates:
                roots[own] = candidates.pop()
                changed = True


def _root(roots: dict[UUID, UUID], part: UUID) -> UUID:
    while roots[part] != part:
        roots[part] = part = roots[roots[part]]
    return part


def _places(parts: list[EpisodePart], doubts: Mapping[UUID, str]) -> dict[UUID, PartPlace]:
    """Return the places of one episode's parts; the earliest part stands for the episode.

    If a part is held, the others are quarantined instead of joined.
    """
    if any(part.held for part in parts):
        return {part.id: PartPlace(quarantined_reason=TOO_LATE) for part in parts if not part.held}
    ordered = sorted(parts, key=lambda part: (part.first_call_id, part.id))
    first, *others = ordered
    reason = next((doubts[part.id] for part in ordered if part.id in doubts), None)
    places = {part.id: PartPlace(root=first.id, quarantined_reason=reason) for part in others}
    task = _choose_task(parts)
    task = None if task == first.task else task
    return places | {first.id: PartPlace(joined_task=task, quarantined_reason=reason)}


def _choose_task(parts: list[EpisodePart]) -> str | None:
    """Return the task of the joined parts: a named before a derived one, then the earliest."""
    ranked = [(not part.task_named, part.task_from, part) for part in parts if part.task_from]
    return min(ranked, key=lambda one: one[:2])[2].task if ranked else None
