"""The limits of a key: no minute has more than so many requests, and no more run at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.keys.limits import WINDOW_S, Usage, share_of
from store.keys import Grant


def usage(workers: int = 1, **limits: int) -> Usage:
    held = Usage()
    held.hold_to(Grant(id="a", hash=b"", scopes=(), **limits), workers)
    return held


@given(
    st.integers(1, 5),
    st.lists(st.floats(0, 30), min_size=1, max_size=60),
)
def test_no_minute_has_more_than_the_limit_and_who_waits_as_told_is_let_in(
    limit: int, pauses: list[float]
) -> None:
    held, now = usage(per_minute=limit), 1000.0
    begun: list[float] = []
    for pause in pauses:
        now += pause
        wait_s = held.begin(now)
        if wait_s is None:
            begun.append(now)
            held.end()
            continue
        assert 1 <= wait_s <= WINDOW_S + 1
        now += wait_s
        assert held.begin(now) is None
        begun.append(now)
        held.end()
    for at in begun:
        assert sum(at - WINDOW_S < other <= at for other in begun) <= limit


@given(st.integers(1, 4), st.lists(st.booleans(), max_size=60))
def test_no_more_run_than_the_limit(limit: int, steps: list[bool]) -> None:
    held, running = usage(at_once=limit), 0
    for begins in steps:
        if begins:
            let_in = held.begin(0.0) is None
            assert let_in == (running < limit)
            running += let_in
        elif running:
            held.end()
            running -= 1


def test_without_limits_all_are_let_in() -> None:
    held = usage()
    assert [held.begin(0.0) for _ in range(1000)] == [None] * 1000


@pytest.mark.parametrize(
    ("limit", "workers", "share"), [(None, 4, None), (1, 4, 1), (8, 4, 2), (9, 4, 3), (5, 1, 5)]
)
def test_a_worker_has_its_share_rounded_up(
    limit: int | None, workers: int, share: int | None
) -> None:
    assert share_of(limit, workers) == share


def test_a_limit_that_changes_counts_from_then_on() -> None:
    held = usage(per_minute=3)
    assert [held.begin(now) for now in (0.0, 1.0, 2.0)] == [None] * 3
    held.hold_to(Grant(id="a", hash=b"", scopes=(), per_minute=1), 1)
    assert held.begin(3.0) == 59
    held.hold_to(Grant(id="a", hash=b"", scopes=()), 1)
    assert held.begin(3.0) is None


@given(st.integers(1, 50), st.lists(st.tuples(st.floats(0, 30), st.integers(0, 40)), max_size=60))
def test_while_a_minute_has_more_tokens_than_the_limit_no_call_begins(
    limit: int, calls: list[tuple[float, int]]
) -> None:
    held, now = usage(tokens_per_minute=limit), 1000.0
    taken: list[tuple[float, int]] = []

    def in_the_minute() -> int:
        return sum(tokens for at, tokens in taken if now - WINDOW_S < at)

    for pause, tokens in calls:
        now += pause
        wait_s = held.begin(now)
        assert (wait_s is None) == (in_the_minute() < limit)
        if wait_s is not None:
            assert 1 <= wait_s <= WINDOW_S + 1
            # Feedback is let in meanwhile.
            assert held.begin(now, takes_tokens=False) is None
            held.end()
            now += wait_s
            assert held.begin(now) is None
        held.spend(now, tokens)
        taken.append((now, tokens))
        held.end()


def test_tokens_are_a_workers_share_and_count_only_where_they_are_limited() -> None:
    held = usage(workers=4, tokens_per_minute=10)
    held.spend(0.0, 3)
    assert held.begin(0.0) == 60
    free = usage(per_minute=5)
    assert (free.counts_tokens, held.counts_tokens) == (False, True)
    free.spend(0.0, 1000)
    free.hold_to(Grant(id="a", hash=b"", scopes=(), tokens_per_minute=10), 1)
    assert free.begin(0.0) is None
