"""Bounds: what is between them is not refuted, and what is outside them is."""

from math import log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.steward.gate.betting import (
    ABOVE,
    BELOW,
    STEPS,
    Block,
    log_wealth,
    lower_bound,
    upper_bound,
)

BLOCKS = st.lists(st.builds(Block, st.floats(-1, 1), st.floats(0.5, 4), st.just(1.0)), max_size=30)
MISTAKES = st.sampled_from([0.01, 0.05, 0.3])


@given(BLOCKS, MISTAKES)
def test_bounds_are_where_the_wealth_reaches_what_is_needed(
    blocks: list[Block], mistakes: float
) -> None:
    lower, upper = lower_bound(blocks, mistakes), upper_bound(blocks, mistakes)
    needed = log(1 / mistakes)
    assert -1 <= lower < upper <= 1
    if lower > -1:
        assert log_wealth(blocks, lower, ABOVE) >= needed
    if upper < 1:
        assert log_wealth(blocks, upper, BELOW) >= needed
    assert log_wealth(blocks, lower + 1 / STEPS, ABOVE) < needed
    assert log_wealth(blocks, upper - 1 / STEPS, BELOW) < needed


@given(BLOCKS, MISTAKES)
def test_arms_that_change_places_turn_the_bounds(blocks: list[Block], mistakes: float) -> None:
    turned = [block._replace(difference=-block.difference) for block in blocks]
    assert lower_bound(turned, mistakes) == -upper_bound(blocks, mistakes)


def test_without_a_block_everything_is_possible() -> None:
    assert (lower_bound([], 0.05), upper_bound([], 0.05)) == (-1.0, 1.0)


def test_bounds_close_in_on_the_difference() -> None:
    blocks = [Block(difference, 1.0, 1.0) for difference in (0.6, -0.2)] * 1000
    assert lower_bound(blocks, 0.05) == pytest.approx(0.2, abs=0.05)
    assert upper_bound(blocks, 0.05) == pytest.approx(0.2, abs=0.05)
    assert lower_bound(blocks, 0.05) < 0.2 < upper_bound(blocks, 0.05)
