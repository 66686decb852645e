"""Bets against a claim: their wealth is 1 on average where the claim is true."""

from itertools import product
from math import inf, isclose, isfinite, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.steward.gate.betting import ABOVE, BELOW, Block, LateWealth, Side, Wealth, log_wealth

SIDES: list[Side] = [ABOVE, BELOW]
BLOCKS = st.builds(
    lambda share, weight, reach: Block(share * reach, weight, reach),
    st.floats(-1, 1),
    st.floats(0.5, 16),
    st.floats(1, 2),
)
NULLS = st.floats(-0.99, 0.99)


@pytest.mark.parametrize("kind", [Wealth, LateWealth])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("null", [-0.5, -0.02, 0.0, 0.3])
def test_wealth_is_one_on_average_where_the_claim_is_just_true(
    kind: type[Wealth], side: Side, null: float
) -> None:
    # Each block shows one of three differences, whose mean is the null; weights and reaches vary.
    shown = [(-1.0, (1 - null) / 3), (1.0, (1 + null) / 3), (null, 1 / 3)]
    shapes = [(0.9, 1.0), (4.0, 1.5), (1.8, 1.0), (16.0, 1.9)]
    mean = 0.0
    for outcome in product(shown, repeat=len(shapes)):
        wealth, chance = kind(null, side), 1.0
        for (difference, probability), (weight, reach) in zip(outcome, shapes, strict=True):
            wealth.update(Block(difference, weight, reach))
            chance *= probability
        mean += chance * wealth.value
    assert isclose(mean, 1.0, abs_tol=1e-9)


@given(st.lists(BLOCKS, max_size=40), NULLS, st.sampled_from(SIDES), st.booleans())
def test_wealth_is_never_negative(blocks: list[Block], null: float, side: Side, late: bool) -> None:
    wealth = (LateWealth if late else Wealth)(null, side)
    assert wealth.value == 1.0
    for block in blocks:
        wealth.update(block)
        assert 0 <= wealth.value < inf


@given(st.lists(BLOCKS, max_size=30), NULLS, NULLS)
def test_a_bolder_claim_is_refuted_no_later(blocks: list[Block], one: float, other: float) -> None:
    low, high = sorted([one, other])
    assert log_wealth(blocks, low, ABOVE) >= log_wealth(blocks, high, ABOVE) - 1e-9
    assert log_wealth(blocks, high, BELOW) >= log_wealth(blocks, low, BELOW) - 1e-9


@given(st.lists(BLOCKS, max_size=40), NULLS, st.sampled_from(SIDES))
def test_wealth_afterwards_is_that_kept_while_playing(
    blocks: list[Block], null: float, side: Side
) -> None:
    wealth = Wealth(null, side)
    for block in blocks:
        wealth.update(block)
    assert isclose(log(wealth.value), log_wealth(blocks, null, side), abs_tol=1e-6)


@pytest.mark.parametrize("kind", [Wealth, LateWealth])
def test_wealth_stays_a_number_however_much_is_won(kind: type[Wealth]) -> None:
    wealth = kind(0.0, ABOVE)
    for _ in range(5_000):
        wealth.update(Block(1.0, 4.0, 1.0))
    assert isfinite(wealth.value)
    assert wealth.value > 1e100


def test_late_bets_find_a_change_that_early_ones_have_lost_their_money_on() -> None:
    early, late = Wealth(0.0, ABOVE), LateWealth(0.0, ABOVE)
    for difference, count in ((-0.3, 200), (0.5, 60)):
        for _ in range(count):
            early.update(Block(difference, 1.0, 1.0))
            late.update(Block(difference, 1.0, 1.0))
    assert early.value < 1
    assert late.value > 20
