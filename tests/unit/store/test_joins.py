"""Which episodes are one, where several signs or splits meet (`integration/store/test_joins`)."""

from uuid import UUID

from store.link.joins import DOUBTFUL_NEED, EpisodePart, Link, resolve_joins
from store.values.digests import ACROSS_SPLITS, PREFIX, RESPONSE, TOOL_CALL, digest_levels


def uid(number: int) -> UUID:
    return UUID(int=number)


def part(number: int, **changes: object) -> EpisodePart:
    fields = {
        "id": uid(number),
        "first_call_id": uid(100 + number),
        "task": f"derived {number}",
        "task_named": False,
        "task_from": uid(100 + number),
        "doubtful": False,
        "held": False,
    }
    return EpisodePart(**(fields | changes))  # type: ignore[arg-type]


def link(needing: int, *providing: int, level: int = 2) -> list[Link]:
    return [
        Link(
            call_id=uid(100 + needing),
            level=level,
            needed_by=uid(needing),
            provided_by=uid(provided),
        )
        for provided in providing
    ]


def parts(*numbers: int) -> list[EpisodePart]:
    return [part(number) for number in numbers]


def test_fingerprint_provided_by_two_joined_episodes_gives_no_doubt() -> None:
    joins = resolve_joins(parts(1, 2, 3), [*link(3, 1, 2), *link(2, 1)])
    assert joins.places[uid(3)].root == joins.places[uid(2)].root == uid(1)
    assert all(place.quarantined_reason is None for place in joins.places.values())


def test_only_needed_fingerprints_of_the_surest_level_count() -> None:
    joins = resolve_joins(parts(1, 2, 3), [*link(3, 1, level=0), *link(3, 1, 2, level=2)])
    assert joins.places[uid(3)].root == uid(1)
    assert joins.places[uid(2)].root is None
    assert joins.places[uid(2)].quarantined_reason is None


def test_joined_episode_takes_the_task_that_a_part_names() -> None:
    joins = resolve_joins([part(1), part(2, task="named", task_named=True)], link(2, 1))
    assert joins.places[uid(1)].joined_task == "named"
    named_first = resolve_joins([part(1, task="x", task_named=True), part(2)], link(2, 1))
    assert named_first.places[uid(1)].joined_task is None


def test_levels_of_needed_fingerprints_put_ids_before_prefixes() -> None:
    """The lower the level, the surer the evidence: an id is surer than a prefix."""

    def digest(kind: int, number: int) -> bytes:
        return bytes([kind]) + bytes([number]) * 15

    needs = [digest(TOOL_CALL, 1), digest(TOOL_CALL, 2), digest(RESPONSE, 3), digest(PREFIX, 4)]
    assert [level for _, level in digest_levels([*needs, digest(PREFIX, 5)])] == [0, 0, 1, 5, 6]


def test_doubt_across_splits_quarantines_only_the_needing_episode() -> None:
    some = [part(1, split="eval"), part(2, split="eval"), part(3)]
    places = resolve_joins(some, link(3, 1, 2, level=ACROSS_SPLITS + 2)).places
    assert [places[uid(n)].quarantined_reason for n in (1, 2, 3)] == [None, None, DOUBTFUL_NEED]
