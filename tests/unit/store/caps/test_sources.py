"""Shares of an update, in whole episodes and in updates."""

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.caps.sources import (
    NO_KEY,
    ROUNDING,
    Candidate,
    GroupMember,
    Kind,
    Source,
    ages,
    limit_of,
    sources_of,
    whole_size,
    whole_updates,
)


def test_a_cap_is_not_rounded_away() -> None:
    assert limit_of(0.29, 100, 1) == 29
    assert limit_of(0.5, 7, 1) == 3
    # One group at least, which is claimed whole.
    assert limit_of(0.1, 16, 8) == 8


def test_what_came_without_a_key_is_one_key_and_without_a_task_no_task() -> None:
    both: dict[Kind, float] = {"key": 0.5, "task": 0.5}
    assert sources_of(both, None, None) == (Source("key", NO_KEY),)
    assert sources_of(both, "k", "t") == (Source("key", "k"), Source("task", "t"))
    assert sources_of({}, "k", "t") == ()


def test_an_update_of_few_groups_is_measured_by_a_whole_one_of_such_groups() -> None:
    assert whole_size(40, 20, 16) == 40
    assert whole_size(8, 4, 16) == 32
    assert whole_size(0, 0, 16) == 0


def _with(*sources: Source) -> Candidate:
    members = (GroupMember(UUID(int=1), sources),)
    return Candidate(name="", has_signal=True, age_s=900.0, members=members)


def test_what_a_full_source_has_left_waits_since_it_was_trained_on() -> None:
    a, b = Source("key", "a"), Source("key", "b")
    trained_s = {a: 5.0}.get
    candidates = [_with(a), _with(b), _with(a, b)]
    assert ages(candidates, {a, b}, trained_s) == [5.0, 900.0, 5.0]
    assert ages(candidates, set(), trained_s) == [900.0, 900.0, 900.0]


def test_alone_all_that_waits_makes_updates() -> None:
    assert whole_updates([], 4, 0.5) == 0
    assert whole_updates([10], 4, 0.5) == 2.5
    assert whole_updates([10, 10], 4, 1.0) == 5


def test_too_few_sources_make_a_part_of_an_update() -> None:
    assert whole_updates([100, 1], 4, 0.25) == 0.5
    assert whole_updates([100, 1], 4, 0.5) == 0.75


@pytest.mark.parametrize("groups", [1, 5])
@given(
    st.lists(st.integers(min_value=0, max_value=50), min_size=2, max_size=6),
    st.floats(min_value=0.1, max_value=1.0),
)
def test_as_many_whole_updates_as_fit(groups: int, sizes: list[int], cap: float) -> None:
    found = whole_updates(sizes, groups, cap)

    def fit(updates: float) -> bool:
        most = cap * groups * updates
        return sum(min(size, most) for size in sizes) >= groups * updates * (1 - 1e-9)

    if found >= 1 - ROUNDING:
        assert fit(found)
        assert not fit(found * 1.01)
    else:
        assert not fit(1.0)
