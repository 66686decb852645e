"""Say what was deleted of an episode, and which adapters had been trained on it."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple
from uuid import UUID

from store.records import Record

# `marked`: nothing was recorded under that name, and nothing will be any more.
DeletionState = Literal["deleted", "deleted_before", "marked"]


class Receipt(Record, frozen=True, kw_only=True):
    """State what a deletion did about one episode.

    Attributes:
        episode: the episode's key, or the name that was asked for if it is not recorded.
        state: whether it was deleted now, or before, or was only marked.
        keys: the keys of its parts, its own among them; empty if it was deleted before.
        removed: how many rows of each table, and how many dead letters, were deleted.
        rewritten_calls: calls of other episodes that were stored as additions to one of its calls,
            and are stored whole now.
        abandoned_updates: updates that were running and held it; their other episodes are free.
        trained: policy versions whose update was trained on it, ended ones among them.
        carried_by: all versions that come from these, themselves included, up to an import.
        linked: other episodes that repeat some of it, or that it repeats; they are not deleted.
    """

    episode: str
    id: UUID | None = None
    state: DeletionState
    keys: tuple[str, ...] = ()
    removed: Mapping[str, int] = {}
    rewritten_calls: int = 0
    abandoned_updates: tuple[UUID, ...] = ()
    trained: tuple[str, ...] = ()
    carried_by: tuple[str, ...] = ()
    linked: tuple[str, ...] = ()


_TRAINED: Final = """
    SELECT c.policy, u.version
    FROM (TABLE consumptions UNION ALL TABLE freed_consumptions) c
    JOIN updates u ON u.id = c.update_id
    WHERE c.episode_id = ANY($1) AND c.trained AND u.version IS NOT NULL
    ORDER BY 1, 2
"""
# The weights of an import come from elsewhere, whatever version it follows.
_CARRIED: Final = f"""
    WITH RECURSIVE carried (policy, version) AS (
        SELECT policy, version FROM ({_TRAINED}) trained
        UNION SELECT u.policy, u.version FROM carried c
            JOIN updates u ON u.policy = c.policy AND u.parent_version = c.version
            WHERE u.version IS NOT NULL AND NOT u.metrics ? 'imported_from')
    SELECT policy, version FROM carried ORDER BY 1, 2
"""
_LINKED: Final = """
    SELECT DISTINCT o.key FROM links l
    JOIN episodes o ON o.id IN (l.needed_by, l.provided_by) AND o.deleted_at IS NULL
    WHERE (l.needed_by = ANY($1) OR l.provided_by = ANY($1)) AND NOT l.too_common
    ORDER BY 1
"""


class Adapters(NamedTuple):
    """Name the versions that were trained on an episode, and all that come from them."""

    trained: tuple[str, ...]
    carried_by: tuple[str, ...]


async def adapters_of(driver: Any, ids: Sequence[UUID]) -> Adapters:
    """Return the versions that were trained on these episodes, and those that come from them."""
    trained = await driver.fetch(_TRAINED, list(ids))
    carried = await driver.fetch(_CARRIED, list(ids)) if trained else []
    return Adapters(_names(trained), _names(carried))


def _names(rows: Sequence[Any]) -> tuple[str, ...]:
    return tuple(f"{policy}@{version}" for policy, version in rows)


async def linked_to(driver: Any, ids: Sequence[UUID]) -> tuple[str, ...]:
    """Return the keys of the episodes that a link connects with one of these, and are left."""
    return tuple(row[0] for row in await driver.fetch(_LINKED, list(ids)))
