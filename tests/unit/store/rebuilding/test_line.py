"""Which updates a line is made of, and which of them are done."""

from typing import Any
from uuid import UUID

from store.rebuilding.line import Done, Line, PastRow, Rebuilt, done_of, line_of

NOTHING: dict[UUID, frozenset[UUID]] = {}


def one(number: int) -> UUID:
    return UUID(int=number)


def past(number: int, parent: int, version: int | None, **more: Any) -> PastRow:
    return PastRow(id=one(number), parent_version=parent, version=version, **more)


def again(
    number: int, parent: int, version: int | None, of: int, after: int | None, *out: int
) -> PastRow:
    left = tuple(one(episode) for episode in out)
    rebuilt = Rebuilt(source=one(of), after=None if after is None else one(after), left_out=left)
    return past(number, parent, version, rebuilt=rebuilt)


def sources(line: Line) -> list[tuple[int, bool]]:
    return [(item.source.id.int, item.trains) for item in line.items]


def rows(done: Done) -> list[int]:
    return [row.id.int for row in done.rows]


def leaving(**out: int) -> dict[UUID, frozenset[UUID]]:
    """What to leave out: `u2=7` is episode 7 of update 2."""
    return {one(int(name[1:])): frozenset([one(episode)]) for name, episode in out.items()}


PLAIN = [past(1, 0, 1), past(2, 1, None), past(3, 1, 2), past(4, 2, 3)]


def test_a_line_is_its_ancestors_and_what_made_no_version() -> None:
    line = line_of(PLAIN, 3)
    assert (line.root, line.head) == (0, 3)
    assert sources(line) == [(1, True), (2, True), (3, True), (4, True)]


def test_what_was_rejected_is_not_of_it_but_for_its_baselines() -> None:
    rejected = past(5, 1, 2)
    moving = past(5, 1, 2, has_baselines=True)
    after = past(6, 1, 3)
    assert sources(line_of([past(1, 0, 1), rejected, after], 3)) == [(1, True), (6, True)]
    assert sources(line_of([past(1, 0, 1), moving, after], 3)) == [
        (1, True),
        (5, False),
        (6, True),
    ]


def test_it_begins_at_the_last_import() -> None:
    imported = [past(1, 0, 1), past(2, 0, 2, imported=True), past(3, 2, 3)]
    line = line_of(imported, 3)
    assert (line.root, sources(line)) == (2, [(3, True)])
    nothing = line_of(imported, 2)
    assert (nothing.root, sources(nothing)) == (2, [])


def test_where_nothing_is_left_out_the_past_stands() -> None:
    line = line_of(PLAIN, 3)
    [done] = done_of(line, PLAIN, NOTHING)
    assert (rows(done), done.version) == ([1, 2, 3, 4], 3)
    [done] = done_of(line, PLAIN, leaving(u3=7))
    assert (rows(done), done.version) == ([1, 2], 1)
    assert done_of(line, PLAIN, leaving(u1=7)) == (Done(rows=(), version=0),)


def test_what_was_done_again_is_found_by_where_it_stands() -> None:
    # From the root, from version 1, and from version 1 with something else left out.
    begun = [again(10, 0, 4, 1, None), again(11, 4, None, 2, 10, 7)]
    other = [again(12, 1, None, 2, 1, 7), again(13, 1, 5, 3, 12)]
    wrong = [again(14, 1, None, 2, 1, 8)]
    line, known = line_of(PLAIN, 3), [*PLAIN, *begun, *other, *wrong]
    first, second = done_of(line, known, leaving(u2=7))
    assert (rows(first), first.version) == ([1, 12, 13], 5)
    assert (rows(second), second.version) == ([10, 11], 4)


def test_a_past_update_is_not_taken_for_one_from_other_baselines() -> None:
    # Update 2 is done again and makes no version: the parent of 3 is the same, and not what it saw.
    [done] = done_of(line_of(PLAIN, 3), [*PLAIN, again(10, 1, None, 2, 1, 7)], leaving(u2=7))
    assert rows(done) == [1, 10]


def test_what_a_finished_rebuild_was_trained_on_after_it_stands() -> None:
    known = [
        *PLAIN,
        *(again(10, 0, 4, 1, None, 7), again(11, 4, None, 2, 10)),
        *(again(12, 4, 5, 3, 11), again(13, 5, None, 4, 12)),
        *(past(20, 5, 6), past(21, 6, None), past(22, 6, 7)),
    ]
    line = line_of(known, 7)
    assert sources(line) == [(number, True) for number in (1, 2, 3, 4, 20, 21, 22)]
    [done] = done_of(line, known, leaving(u1=7))
    assert (rows(done), done.version) == ([10, 11, 12, 13, 20, 21, 22], 7)
    [done] = done_of(line, known, leaving(u1=7, u21=9))
    assert (rows(done), done.version) == ([10, 11, 12, 13, 20], 6)
    # A trainer that went on with the old line while the rebuild was stopped.
    [longer, *_] = done_of(line_of([*known[:6], past(20, 3, 6)], 6), known[:6], leaving(u1=7))
    assert rows(longer) == [10, 11]
