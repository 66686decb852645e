"""Tell which past updates made a policy's line, and which of them a rebuild has done (pure).

A line is what a version learned: the updates of its ancestors, back to the base model or an import,
and those between them that made no version. A rebuild does each of them again, in the order of
their claims, without the episodes that are left out (docs/decisions/079-rebuilding.md).
"""

from collections.abc import Mapping, Sequence, Set
from typing import Any, Final
from uuid import UUID

import msgspec

from store.records import Record

NOTHING: Final[frozenset[UUID]] = frozenset()


class Rebuilt(Record, frozen=True, kw_only=True):
    """State of which past update an update is the rebuild; its figures have it as `REBUILT`.

    Attributes:
        source: the update that claimed the episodes.
        after: the update before it in the new line, which may be a past one; None: the first.
        left_out: the episodes of `source` that were left out, sorted.
        untrained: why, by id, for all episodes of `source` that it was not trained on.
    """

    source: UUID
    after: UUID | None
    left_out: tuple[UUID, ...]
    untrained: Mapping[UUID, str] = {}


class PastRow(Record, frozen=True, kw_only=True):
    """Describe a finished update: the version that it made, if any, and of which parent.

    `has_baselines`: it left moving baselines to the next.
    """

    id: UUID
    parent_version: int
    version: int | None
    imported: bool = False
    has_baselines: bool = False
    rebuilt: Rebuilt | None = None


class Item(Record, frozen=True, kw_only=True):
    """Hold one update of a line; `trains` is False if it does no more than move baselines."""

    source: PastRow
    trains: bool


class Line(Record, frozen=True, kw_only=True):
    """Hold the updates of a line in the order of their claims; the first begin at `root`.

    `head` is the version that the line has come to.
    """

    root: int
    head: int
    items: tuple[Item, ...]


class Done(Record, frozen=True, kw_only=True):
    """Hold how far a line is rebuilt: its first updates as they stand, and the version they made.

    A past update stands for itself if nothing is left out of it, nor of any before it.
    """

    rows: tuple[PastRow, ...]
    version: int

    @property
    def last(self) -> UUID | None:
        """Return the update that the next one comes after."""
        return self.rows[-1].id if self.rows else None


def row_of(row: Any) -> PastRow:
    """Return a row of `updates`, with a column for each field, as a record."""
    rebuilt = None if row.rebuilt is None else msgspec.convert(row.rebuilt, Rebuilt)
    return PastRow(**(dict(row._mapping) | {"rebuilt": rebuilt}))


def line_of(rows: Sequence[PastRow], head: int) -> Line:
    """Return the line of version `head`; `rows` are all finished updates in the order of claims."""
    by_version = {row.version: row for row in rows if row.version is not None}
    sources, ancestors, version = set[UUID](), set[int](), head
    while version and not by_version[version].imported:
        row = by_version[version]
        ancestors.add(version)
        sources.add(row.id if row.rebuilt is None else row.rebuilt.source)
        version = row.parent_version
    # What lost its signal in an earlier rebuild is of the line all the same.
    sources |= {
        row.rebuilt.source
        for row in rows
        if row.rebuilt is not None
        and row.version is None
        and row.parent_version in ancestors | {version}
    }
    begins = 0 if not version else rows.index(by_version[version])
    items = (
        Item(source=row, trains=row.id in sources or (row.version is None and place >= begins))
        for place, row in enumerate(rows)
        if row.rebuilt is None and not row.imported
    )
    kept = tuple(item for item in items if item.trains or item.source.has_baselines)
    return Line(root=version, head=head, items=kept)


def done_of(
    line: Line, rows: Sequence[PastRow], left_out: Mapping[UUID, Set[UUID]]
) -> tuple[Done, ...]:
    """Return how far the line is rebuilt already, in each way that a rebuild may have begun.

    That is from its root, or from the last version before anything is left out; the furthest comes
    first. `left_out` are the episodes to leave out, by the update that claimed them.
    """
    ways = {
        done.last: done
        for done in (_walk(line, rows, left_out, own_first=own) for own in (True, False))
    }
    return tuple(sorted(ways.values(), key=lambda done: -len(done.rows)))


def _walk(
    line: Line, rows: Sequence[PastRow], left_out: Mapping[UUID, Set[UUID]], *, own_first: bool
) -> Done:
    done = Done(rows=(), version=line.root)
    for item in line.items:
        wanted = left_out.get(item.source.id, NOTHING)
        again = _rebuilt(rows, item.source.id, done.last, wanted)
        own = item.source if not wanted and _continues(item, done) else None
        update = (own or again) if own_first or done.rows else (again or own)
        if update is None:
            break
        made = done.version if update.version is None or not item.trains else update.version
        done = Done(rows=(*done.rows, update), version=made)
    return done


def _rebuilt(
    rows: Sequence[PastRow], source: UUID, after: UUID | None, left_out: Set[UUID]
) -> PastRow | None:
    """Return the newest rebuild of `source` that stands at this place of a line."""
    rebuilds = [
        row
        for row in rows
        if row.rebuilt is not None
        and (row.rebuilt.source, row.rebuilt.after) == (source, after)
        and set(row.rebuilt.left_out) == left_out
    ]
    return rebuilds[-1] if rebuilds else None


def _continues(item: Item, done: Done) -> bool:
    """Return whether a past update was made from just what is done before it in the line."""
    is_rebuilt = [row.rebuilt is not None for row in done.rows]
    if not any(is_rebuilt):
        return not item.trains or item.source.parent_version == done.version
    versions = [row.version for row in done.rows]
    if item.source.parent_version != done.version or done.version not in versions:
        return False
    # What is done again after the parent has moved the baselines; but a rebuild that has come to
    # its end is what the first update after it was made from.
    made = versions.index(done.version)
    return is_rebuilt[made] or not any(is_rebuilt[made:])
