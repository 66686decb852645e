"""The budget of bytes in flight: whatever is asked and given back, the sum is right."""

import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.errors import BadRequest, Overloaded, TooLarge
from proxy.intake import (
    COPIES,
    LONG_BYTES,
    MAX_CONTAINERS,
    MAX_VALUES,
    SMALL_BYTES,
    SWITCH_S,
    Budget,
    BudgetShare,
    Intake,
    check_shape,
    memory_cost_of,
    takes_long,
)
from store.values.documents import MAX_DEPTH

LIMIT = 10 * SMALL_BYTES
SIZES = (
    st.integers(0, SMALL_BYTES // 2)
    | st.integers(SMALL_BYTES - 2, SMALL_BYTES + 2)
    | st.integers(0, 2 * LIMIT)
)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from(["ask", "add", "new", "end"]), st.integers(0, 5), SIZES)))
def test_used_memory_budget_is_the_sum_of_the_requests_shares(
    steps: list[tuple[str, int, int]],
) -> None:
    budget = Budget(LIMIT)
    claims: list[BudgetShare] = []
    for what, which, size in steps:
        if what == "new" or not claims:
            claims.append(budget.claim())
        claim = claims[which % len(claims)]
        if what == "ask":
            held = claim.held
            try:
                claim.claim_at_least(size)
            except Overloaded:
                assert claim.held == held
                # Nobody alone is refused, and nobody while there is room.
                assert budget.used - held + size > LIMIT
                assert sum(other.held for other in claims) > held
            else:
                assert claim.held == max(held, size)
        elif what == "add":
            claim.charge(size)
        elif what == "end":
            claim.release()
            claim.release()
            claims.remove(claim)
        assert budget.used == sum(other.held for other in claims) >= 0
        assert budget._small == sum(other.held for other in claims if other.held <= SMALL_BYTES)
        assert budget._large_claims == sum(other.held > SMALL_BYTES for other in claims)
    for claim in claims:
        claim.release()
    assert (budget.used, budget._small, budget._large_claims) == (0, 0, 0)


@pytest.mark.parametrize("limit", [1, 2**20, 16 * 2**20, LIMIT])
@given(size=st.integers(0, 2**40))
def test_lone_request_is_let_in_with_any_budget(limit: int, size: int) -> None:
    with Budget(limit).claim() as alone:
        alone.claim_at_least(size)
        assert alone.held == size


def test_large_request_is_let_in_without_other_large_but_with_small_requests() -> None:
    budget = Budget(LIMIT)
    with budget.claim() as large, budget.claim() as other, budget.claim() as small:
        large.claim_at_least(3 * LIMIT)
        with pytest.raises(Overloaded, match="PAWL_IN_FLIGHT_MB"):
            other.claim_at_least(SMALL_BYTES + 1)
        small.claim_at_least(SMALL_BYTES)
        other.claim_at_least(SMALL_BYTES)
        with budget.claim() as last, pytest.raises(Overloaded):
            last.claim_at_least(SMALL_BYTES)
    assert budget.used == 0


def test_failing_request_gives_back_its_share_of_the_memory_budget() -> None:
    budget = Budget(LIMIT)

    def fail() -> None:
        with budget.claim() as claim:
            claim.claim_at_least(7)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert budget.used == 0


@pytest.mark.parametrize(
    ("body", "refusal"),
    [
        (b"[" + b"{}," * (MAX_CONTAINERS - 2) + b"0]", None),
        (b"[" + b"{}," * MAX_CONTAINERS + b"0]", TooLarge),
        (b"[" + b"1," * (MAX_VALUES - 2) + b"1]", None),
        (b"[" + b"1," * MAX_VALUES + b"1]", TooLarge),
        (b'["' + b"[,{" * MAX_VALUES + b'"]', None),
        (b"[" * MAX_DEPTH + b"]" * MAX_DEPTH, None),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), BadRequest),
        (b"not JSON [[[", None),
    ],
)
def test_json_body_with_too_many_containers_values_or_levels_is_refused(
    body: bytes, refusal: Any
) -> None:
    if refusal is None:
        assert memory_cost_of(body, check_shape(body)) >= COPIES * len(body)
    else:
        with pytest.raises(refusal):
            check_shape(body)


def test_only_bodies_that_take_long_are_parsed_beside_the_event_loop() -> None:
    for body, long in ((b"[]", False), (b"[" + b"{}," * 4000, True), (b" " * LONG_BYTES, False)):
        assert takes_long(body, check_shape(body)) is long


async def test_thread_switch_interval_is_shorter_only_during_work_beside_the_event_loop() -> None:
    usual = sys.getswitchinterval()
    intake = Intake(budget=LIMIT, max_body=LIMIT, max_feedback=LIMIT)
    assert await intake.run_in_thread(sys.getswitchinterval) == pytest.approx(SWITCH_S)
    assert sys.getswitchinterval() == usual
    with pytest.raises(ZeroDivisionError):
        await intake.run_in_thread(lambda: 1 / 0)
    assert sys.getswitchinterval() == usual
    intake.close()
