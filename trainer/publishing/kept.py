"""Tell which versions' files and optimiser states must stay, by the versions' states (pure)."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

from store.version_queries import OnceServed, RollbackTargets
from store.versions import SERVABLE, PolicyVersion

# States in which a version's files are read: it is published, or may be.
IN_USE: Final = ("written", *SERVABLE)
# Those from which training may go on.
HEADS: Final = ("written", "ready", "candidate", "canary", "serving")
# How many times as far back the next that stays may be: at that distance a roll-back loses as much
# again as has fallen.
SPARSE: Final = 2


def spaced(served: Sequence[OnceServed]) -> set[int]:
    """Return some of the versions that had the traffic, fewer the longer ago they had it.

    Of two that are neighbours one is at most `SPARSE` times as far back as the other, unless there
    was nothing between them; so of 10,000 versions about twenty are left. Nothing that is left out
    now is needed later: the longer ago both were, the nearer they are to each other.

    Args:
        served: those whose files are there, the last first.
    """
    kept = list(served[:1])
    for one, before in pairwise(served[1:]):
        if before.place > SPARSE * kept[-1].place:
            kept.append(one)
    return {one.version for one in (*kept, *served[-1:])}


def kept_files(versions: Sequence[PolicyVersion], back: RollbackTargets) -> set[int]:
    """Return the versions whose files stay whatever else is known.

    They are in use, or a roll-back may give them the traffic, or a rebuild goes on from them. While
    the base model has a share of the episodes, a fall may be found long after it began, and so the
    traffic may go back a long way.
    """
    in_use = _numbers(one for one in versions if one.state in IN_USE)
    is_watched = any(one.version == 0 and one.share for one in versions)
    far = spaced(back.served) if is_watched else set()
    return in_use | _last_good(versions, back) | far | _under_way(versions)


def kept_states(versions: Sequence[PolicyVersion], back: RollbackTargets) -> set[int]:
    """Return the versions that training may go on from, whose optimiser states stay.

    That is the one with the traffic, the one before it, those that may still get it, and the one
    that a rebuild has come to. What has the traffic again after a longer way back starts anew.
    """
    heads = _numbers(one for one in versions if one.state in HEADS)
    return heads | _last_good(versions, back) | _under_way(versions)


def old_states(
    versions: Sequence[PolicyVersion], back: RollbackTargets, folders: Iterable[int]
) -> list[int]:
    """Return the numbers of folders whose optimiser state training cannot go on from.

    A version that is not recorded yet may be the next to serve.
    """
    old = _numbers(versions) - kept_states(versions, back)
    return [number for number in folders if number in old]


def leftovers(versions: Sequence[PolicyVersion], folders: Iterable[int]) -> list[int]:
    """Return the numbers of folders that no reader is left for.

    They are marked as deleted, or no update recorded them. A folder above all versions that have
    files stays: it keeps its number from being given again.
    """
    there = _numbers(one for one in versions if not one.files_deleted)
    newest = max(there, default=0)
    return [number for number in folders if number not in there and number < newest]


def _last_good(versions: Sequence[PolicyVersion], back: RollbackTargets) -> set[int]:
    """Return the version that would serve if what serves were rolled back, if it has files."""
    return {back.before} & _numbers(versions)


def _under_way(versions: Sequence[PolicyVersion]) -> set[int]:
    """Return the version that a rebuild which is not at its end goes on from, if there is one."""
    rebuilt = [one for one in versions if one.rebuilt_from is not None]
    newest = max(rebuilt, key=lambda one: one.version, default=None)
    return set() if newest is None or newest.state != "rejected" else {newest.version}


def _numbers(versions: Iterable[PolicyVersion]) -> set[int]:
    return {one.version for one in versions}
