"""Corrections: which one counts, and whose it is."""

from itertools import permutations

import pytest

from store.records import Feedback
from tests.support.stored import said
from trainer.credit.corrections import correction_of, corrections_of

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
        assert correction_of(order) == counts


def test_correction_of_an_episode_is_given_to_its_only_call() -> None:
    assert corrections_of([SECOND], [[FIRST]]) == ["second"]
    assert corrections_of([FIRST], [[SECOND]]) == ["second"]
    assert corrections_of([said(None, 9)], [[FIRST]]) == [None]
    assert corrections_of([SECOND], [[FIRST], []]) == ["first", None]
    assert corrections_of([SECOND], []) == []
