"""Which episodes are one: by content, in no order, and never by a guess."""

import random
from uuid import UUID

import pytest

from store.link.joins import (
    DOUBTFUL_CALL,
    DOUBTFUL_NEED,
    MOST_PROVIDERS,
    TOLD_MORE_THAN_ONE,
    TOO_LATE,
    EpisodePart,
    Link,
    resolve,
)
from store.values.digests import ACROSS, PREFIX, RESPONSE, TOOL_CALL, levels


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


def link(needing: int, *providing: int, level: int = 2, call: int | None = None) -> list[Link]:
    call_id = uid(100 + needing if call is None else call)
    return [
        Link(call_id=call_id, level=level, needed_by=uid(needing), provided_by=uid(provided))
        for provided in providing
    ]


def parts(*numbers: int) -> list[EpisodePart]:
    return [part(number) for number in numbers]


def test_an_ask_that_one_episode_answers_joins_it() -> None:
    joins = resolve(parts(1, 2), link(2, 1))
    assert joins.places[uid(2)].root == uid(1)
    assert joins.places[uid(1)].root is None
    assert joins.calls == {uid(102): ("prefix", "likely")}


@pytest.mark.parametrize(("level", "method"), [(0, "tool_call"), (1, "response")])
def test_ids_are_certain(level: int, method: str) -> None:
    assert resolve(parts(1, 2), link(2, 1, level=level)).calls[uid(102)] == (method, "certain")


def test_an_ask_that_two_answer_joins_neither_and_all_are_kept_apart() -> None:
    joins = resolve(parts(1, 2, 3), link(3, 1, 2))
    assert {place.root for place in joins.places.values()} == {None}
    assert joins.places[uid(3)].quarantined_reason == DOUBTFUL_NEED
    assert joins.places[uid(1)].quarantined_reason == TOLD_MORE_THAN_ONE
    assert joins.places[uid(2)].quarantined_reason == TOLD_MORE_THAN_ONE
    assert joins.calls == {uid(103): None}


def test_two_that_are_one_by_another_ask_are_no_doubt() -> None:
    joins = resolve(parts(1, 2, 3), [*link(3, 1, 2), *link(2, 1)])
    assert joins.places[uid(3)].root == joins.places[uid(2)].root == uid(1)
    assert all(place.quarantined_reason is None for place in joins.places.values())


def test_the_surest_sign_counts_alone() -> None:
    joins = resolve(parts(1, 2, 3), [*link(3, 1, level=0), *link(3, 1, 2, level=2)])
    assert joins.places[uid(3)].root == uid(1)
    assert joins.places[uid(2)].root is None
    assert joins.places[uid(2)].quarantined_reason is None


def test_what_too_many_were_told_is_the_askers_doubt_alone() -> None:
    providing = range(1, MOST_PROVIDERS + 2)
    some = link(50, *providing)
    few = resolve(parts(*providing, 50), some[:-1])
    assert few.places[uid(1)].quarantined_reason == TOLD_MORE_THAN_ONE
    many = resolve(parts(*providing, 50), some)
    assert many.places[uid(50)].quarantined_reason == DOUBTFUL_NEED
    assert many.places[uid(1)].quarantined_reason is None


def test_a_doubt_is_the_whole_episodes() -> None:
    joins = resolve([part(1), part(2, doubtful=True)], link(2, 1))
    assert {p.quarantined_reason for p in joins.places.values()} == {DOUBTFUL_CALL}


def test_a_task_that_a_part_names_is_the_whole_episodes() -> None:
    joins = resolve([part(1), part(2, task="named", task_named=True)], link(2, 1))
    assert joins.places[uid(1)].joined_task == "named"
    named_first = resolve([part(1, task="x", task_named=True), part(2)], link(2, 1))
    assert named_first.places[uid(1)].joined_task is None


def test_what_is_held_stays_and_who_comes_late_is_kept_apart() -> None:
    joins = resolve([part(1, held=True), part(2)], link(2, 1))
    assert uid(1) not in joins.places
    assert joins.places[uid(2)].root is None
    assert joins.places[uid(2)].quarantined_reason == TOO_LATE
    assert joins.calls == {uid(102): None}


def test_no_order_matters() -> None:
    dice = random.Random(5)
    for _ in range(300):
        some = parts(*range(1, 8))
        links = [
            found
            for needing in range(2, 8)
            for found in link(
                needing, *{dice.randrange(1, 8) for _ in range(dice.randrange(3))} - {needing}
            )
        ]
        first = resolve(some, links)
        dice.shuffle(some)
        dice.shuffle(links)
        again = resolve(some, links)
        assert dict(again.places) == dict(first.places)
        assert dict(again.calls) == dict(first.calls)


def test_levels_put_ids_before_prefixes() -> None:
    def digest(kind: int, number: int) -> bytes:
        return bytes([kind]) + bytes([number]) * 15

    needs = [digest(TOOL_CALL, 1), digest(TOOL_CALL, 2), digest(RESPONSE, 3), digest(PREFIX, 4)]
    assert [level for _, level in levels([*needs, digest(PREFIX, 5)])] == [0, 0, 1, 5, 6]


def test_an_episode_with_a_part_of_evaluation_is_evaluation_as_a_whole() -> None:
    some = [part(1), part(2, split="eval"), part(3), part(4)]
    joins = resolve(some, [*link(2, 1, level=ACROSS), *link(3, 2, level=ACROSS)])
    assert joins.evaluation == {uid(1), uid(2), uid(3)}
    assert joins.calls[uid(102)] == ("tool_call", "certain")


def test_a_held_episode_that_evaluation_continues_is_evaluation_too() -> None:
    joins = resolve([part(1, held=True), part(2, split="eval")], link(2, 1))
    assert joins.evaluation == {uid(1), uid(2)}
    assert joins.places[uid(2)].quarantined_reason == TOO_LATE


def test_a_match_across_splits_counts_only_where_there_is_none_within() -> None:
    some = [part(1), part(2, split="eval"), part(3)]
    joins = resolve(some, [*link(3, 1, level=9), *link(3, 2, level=ACROSS)])
    assert joins.places[uid(3)].root == uid(1)
    assert joins.evaluation == {uid(2)}


def test_a_doubt_across_splits_is_the_needing_episodes_alone() -> None:
    some = [part(1, split="eval"), part(2, split="eval"), part(3)]
    joins = resolve(some, link(3, 1, 2, level=ACROSS + 2))
    assert joins.places[uid(3)].quarantined_reason == DOUBTFUL_NEED
    assert joins.places[uid(1)].quarantined_reason is None
    assert joins.places[uid(2)].quarantined_reason is None
