"""Corrections: which one counts, whose it is, and what share of the loss it has."""

from itertools import permutations
from math import fsum, isclose
from typing import Any

import msgspec
import pytest

from store.records import Feedback, Group
from tests.support import lines, stored
from tests.support.lines import credited, reward
from tests.support.stored import said, transition
from trainer.credit.assign import assign_credit
from trainer.credit.corrections import correction_of, corrections_of
from trainer.credit.lines import CreditLine
from trainer.recipes.recipe import CreditOptions

FIRST, SECOND = said(0.0, 1, correction="first"), said(0.0, 5, correction="second")


@pytest.mark.parametrize(
    ("statements", "counts"),
    [
        ([said(0.0)], None),
        ([FIRST, SECOND], "second"),
        # A judge's later score takes back nothing that a person wrote.
        ([FIRST, said(0.5, 3)], "first"),
        ([FIRST, said(None, 3)], None),
        ([FIRST, said(None, 1)], None),
        ([FIRST, said(None, 3), SECOND], "second"),
        ([FIRST, SECOND, said(None, 9)], None),
        ([FIRST, said(None, 3, "minutes")], "first"),
        ([FIRST, said(1.0, 1, "minutes", "other")], "other"),
    ],
)
def test_newest_correction_counts_in_any_order_until_it_is_withdrawn(
    statements: list[Feedback], counts: str | None
) -> None:
    for order in permutations(statements):
        found = correction_of(order)
        assert (found and found.correction) == counts


def test_correction_of_an_episode_is_its_only_calls() -> None:
    assert corrections_of([SECOND], [[FIRST]]) == ["second"]
    assert corrections_of([FIRST], [[SECOND]]) == ["second"]
    assert corrections_of([SECOND], [[FIRST], []]) == ["first", None]
    assert corrections_of([SECOND], []) == []


def with_correction(name: str, value: float, **changes: Any) -> dict[str, Any]:
    return lines.episode(name, reward(value) | {"correction": "right"}, **changes)


def weights(found: dict[tuple[str, str], CreditLine]) -> dict[str, tuple[float, object]]:
    return {name: (line.weight, line.correction) for (name, _), line in found.items()}


def test_correction_counts_as_one_more_episode_and_its_calls_credit_stays() -> None:
    plain = credited([lines.episode("a", 1.0), lines.episode("b", 0.0)])
    found = credited([lines.episode("a", 1.0), with_correction("b", 0.0)])
    third = pytest.approx(1 / 3)
    assert weights(found) == {"a": (third, msgspec.UNSET), "b": (third, third)}
    assert {key: line.advantage for key, line in found.items()} == {
        key: line.advantage for key, line in plain.items()
    }


def test_corrections_of_one_episode_share_its_weight_and_all_weights_are_one_in_sum() -> None:
    said_of_each = [reward(0.0) | {"correction": "right"}]
    three = [lines.call(str(number), feedback=said_of_each) for number in range(3)]
    members = [lines.episode("a", 1.0), lines.episode("b", 0.0, calls=three)]
    for rule in ({}, {"equal_weight": "token"}, {"equal_weight": "call"}):
        found = list(credited(members, **rule).values())
        shares = [line.correction for line in found if isinstance(line.correction, float)]
        assert shares == [pytest.approx(1 / 9)] * 3
        assert isclose(fsum([*shares, *(line.weight for line in found)]), 1.0)


def test_episode_without_a_signal_of_its_own_is_trained_by_its_correction() -> None:
    alone = with_correction("a", 0.0, task=None)
    untrained = alone | {"calls": [lines.call(trainable=False, reason="greedy")]}
    [line] = credited([untrained]).values()
    assert (line.weight, line.reason, line.correction) == (0.0, "alone", 1.0)


def test_neither_quarantined_nor_earlier_episodes_nor_refused_calls_are_corrected() -> None:
    [line] = credited([with_correction("a", 0.0, quarantined="doubtful")]).values()
    assert line.correction is msgspec.UNSET
    call = transition(feedback=(FIRST,))
    member = msgspec.structs.replace(stored.episode(0.0), calls=(call,))
    other = stored.episode(1.0)

    def shares(group: Group, *refused: str) -> list[float]:
        found = assign_credit(
            [group], CreditOptions(), policy="m", oldest_version=0, uncorrected=refused
        )
        return [one.correction for one in found.transitions]

    assert shares(Group(task="t", episodes=(member, other))) == [pytest.approx(1 / 3), 0.0]
    assert shares(Group(task="t", episodes=(other,), earlier=(member,))) == [0.0]
    assert shares(Group(task="t", episodes=(member, other)), str(call.id)) == [0.0, 0.0]
