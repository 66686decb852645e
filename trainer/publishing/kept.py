"""Tell which versions' files and optimiser states must stay, by the versions' states (pure)."""

from collections.abc import Iterable, Sequence
from typing import Final

from store.versions import SERVABLE, PolicyVersion

# States in which a version's files are read: it is published, or may be.
IN_USE: Final = ("written", *SERVABLE)
# Those from which training may go on.
HEADS: Final = ("written", "ready", "candidate", "canary", "serving")
HAD_TRAFFIC: Final = ("published", "retired")


def last_good(versions: Sequence[PolicyVersion]) -> int | None:
    """Return the version that had the traffic before the one that has it, or None."""
    serving = max((one.version for one in versions if one.state == "serving"), default=0)
    before = [
        one.version
        for one in versions
        # A canary that made way before it served keeps its share, which serving ends.
        if one.state in HAD_TRAFFIC
        and one.version < serving
        and not one.rolled_back
        and one.share is None
    ]
    return max(before, default=None)


def kept_files(versions: Sequence[PolicyVersion]) -> set[int]:
    """Return the versions whose files stay whatever else is known.

    They are in use, or the last good one, or a rebuild goes on from them.
    """
    in_use = _numbers(one for one in versions if one.state in IN_USE)
    return in_use | _last_good(versions) | _under_way(versions)


def kept_states(versions: Sequence[PolicyVersion]) -> set[int]:
    """Return the versions that training may go on from, whose optimiser states stay.

    That is the one with the traffic, the one before it, those that may still get it, and the one
    that a rebuild has come to.
    """
    heads = _numbers(one for one in versions if one.state in HEADS)
    return heads | _last_good(versions) | _under_way(versions)


def old_states(versions: Sequence[PolicyVersion], folders: Iterable[int]) -> list[int]:
    """Return the numbers of folders whose optimiser state training cannot go on from.

    A version that is not recorded yet may be the next to serve.
    """
    old = _numbers(versions) - kept_states(versions)
    return [number for number in folders if number in old]


def leftovers(versions: Sequence[PolicyVersion], folders: Iterable[int]) -> list[int]:
    """Return the numbers of folders that no reader is left for.

    They are marked as deleted, or no update recorded them. A folder above all versions that have
    files stays: it keeps its number from being given again.
    """
    there = _numbers(one for one in versions if not one.files_deleted)
    newest = max(there, default=0)
    return [number for number in folders if number not in there and number < newest]


def _last_good(versions: Sequence[PolicyVersion]) -> set[int]:
    number = last_good(versions)
    return set() if number is None else {number}


def _under_way(versions: Sequence[PolicyVersion]) -> set[int]:
    """Return the version that a rebuild which is not at its end goes on from, if there is one."""
    rebuilt = [one for one in versions if one.rebuilt_from is not None]
    newest = max(rebuilt, key=lambda one: one.version, default=None)
    return set() if newest is None or newest.state != "rejected" else {newest.version}


def _numbers(versions: Iterable[PolicyVersion]) -> set[int]:
    return {one.version for one in versions}
