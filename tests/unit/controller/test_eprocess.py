"""Bets against a claim: blocks show the true effect, wealth is 1 on average, bounds hold."""

from itertools import combinations, product
from math import inf, isclose, isfinite, log
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.eprocess import (
    ABOVE,
    BELOW,
    LONGEST_BLOCK,
    MAX_BLOCK_SIZE,
    MIN_BLOCK_SIZE,
    MOST_CENTRES,
    STEPS,
    Block,
    Blocks,
    ChangeDetector,
    EProcess,
    FamilyMeans,
    Side,
    block_size,
    difference_bound,
    log_wealth,
)

SIZE = 8
STREAM = st.lists(
    st.tuples(st.booleans(), st.sampled_from("abc"), st.floats(0, 1)),
    min_size=SIZE,
    max_size=5 * SIZE,
)
SIDES: list[Side] = [ABOVE, BELOW]
BLOCKS = st.lists(
    st.builds(
        lambda share, weight, reach: Block(share * reach, weight, reach),
        st.floats(-1, 1),
        st.floats(0.5, 16),
        st.floats(1, 2),
    ),
    max_size=40,
)
NULLS = st.floats(-0.99, 0.99)
FULL_REACH = st.lists(
    st.builds(Block, st.floats(-1, 1), st.floats(0.5, 4), st.just(1.0)), max_size=30
)
MISTAKES = st.sampled_from([0.01, 0.05, 0.3])


def closed(blocks: Blocks, *episode: Any) -> Block | None:
    """Return what the block says that an episode completes."""
    blocks.add(*episode)
    return blocks.close() if blocks.is_full else None


def last_block(stream: list[tuple[bool, str, float]]) -> Block | None:
    """Return what the last block says, which is closed early if it is not full."""
    blocks = Blocks(SIZE)
    found = None
    for episode in stream:
        found = closed(blocks, *episode)
    return blocks.close() if len(stream) % SIZE else found


@pytest.mark.parametrize("count", [SIZE, SIZE - 2])
@pytest.mark.parametrize("tested", range(1, SIZE - 2))
def test_mean_block_difference_over_all_arm_assignments_is_the_true_effect(
    tested: int, count: int
) -> None:
    # Families, a drift and an effect of their own for each episode; the blocks before it
    # taught the families' means. A block that is closed early shows the effect, too.
    before = [(number % 3 == 0, "abc"[number % 3], (number % 5) / 4) for number in range(2 * SIZE)]
    families = "aabcabbc"
    without = [0.0, 0.1, 0.5, 0.3, 0.6, 0.7, 0.65, 0.9][:count]
    with_it = [0.2, 0.0, 0.9, 0.3, 1.0, 0.4, 0.95, 0.8][:count]
    shown = []
    for chosen in combinations(range(count), tested):
        values = [(with_it if at in chosen else without)[at] for at in range(count)]
        own = [(at in chosen, families[at], value) for at, value in enumerate(values)]
        block = last_block(before + own)
        assert block is not None
        shown.append(block.difference)
    assert fmean(shown) == pytest.approx(fmean(with_it) - fmean(without), abs=1e-12)


@given(STREAM)
def test_difference_of_a_block_is_within_the_blocks_reach(
    stream: list[tuple[bool, str, float]],
) -> None:
    blocks = Blocks(SIZE)
    for episode in stream:
        block = closed(blocks, *episode)
        if block is not None:
            assert abs(block.difference) <= block.reach + 1e-12
            assert 1 <= block.reach <= 2


@given(STREAM)
def test_swapped_arms_reverse_the_sign_of_the_block_difference(
    stream: list[tuple[bool, str, float]],
) -> None:
    one = last_block(stream)
    other = last_block([(not tested, family, value) for tested, family, value in stream])
    if one is None or other is None:
        assert one is other
    else:
        assert one.difference == pytest.approx(-other.difference)
        assert (one.weight, one.reach) == (other.weight, other.reach)


def test_block_waits_for_an_episode_of_the_other_arm_up_to_a_longest_block() -> None:
    blocks = Blocks(SIZE)
    assert [closed(blocks, False, "a", 0.5) for _ in range(SIZE + 2)] == [None] * (SIZE + 2)
    found = closed(blocks, True, "a", 0.5)
    assert found == Block(pytest.approx(0.0), weight=10 / 11, reach=1.0)
    assert [closed(blocks, False, "a", 1.0) for _ in range(LONGEST_BLOCK)] == [None] * LONGEST_BLOCK
    assert not blocks.is_full
    assert blocks.close() is None


def test_different_mean_rewards_of_task_families_hardly_show_in_block_differences() -> None:
    stream = [(number % 4 == 1, "ab"[number % 2], float(number % 2)) for number in range(40 * SIZE)]
    block = last_block(stream)
    assert block is not None
    assert abs(block.difference) < 0.1


@pytest.mark.parametrize(
    ("tested", "other", "size"),
    [
        (0.1, 0.9, 6),
        (0.5, 0.5, MIN_BLOCK_SIZE),
        (0.001, 0.999, MAX_BLOCK_SIZE),
        (0.1, 0.0, MAX_BLOCK_SIZE),
        (0.0, 0.0, MAX_BLOCK_SIZE),
    ],
)
def test_blocks_are_larger_the_rarer_an_arm_is(tested: float, other: float, size: int) -> None:
    assert block_size(tested, other) == size


def test_rewards_of_new_and_surplus_task_families_are_centred_by_the_overall_mean() -> None:
    centres = FamilyMeans()
    assert centres.mean_of("new") == 0.5
    for number in range(MOST_CENTRES):
        centres.add(str(number), 0.0)
    for _ in range(1000):
        centres.add("one more", 1.0)
    for family in ("new", "one more"):
        assert centres.mean_of(family) == pytest.approx(1000 / (MOST_CENTRES + 1000), abs=0.01)


@pytest.mark.parametrize(("kind", "average"), [(EProcess, 1.0), (ChangeDetector, 4.0)])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("null", [-0.5, -0.02, 0.0, 0.3])
def test_expected_wealth_of_an_e_process_is_its_stake_if_the_null_just_holds(
    kind: type[EProcess], average: float, side: Side, null: float
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
    assert isclose(mean, average, abs_tol=1e-9)


@given(BLOCKS, NULLS, st.sampled_from(SIDES))
def test_wealth_of_an_e_process_is_never_negative_and_can_be_recomputed_from_blocks(
    blocks: list[Block], null: float, side: Side
) -> None:
    wealth, late = EProcess(null, side), ChangeDetector(null, side)
    assert (wealth.value, late.value) == (1.0, 0.0)
    for block in blocks:
        wealth.update(block)
        late.update(block)
        assert 0 <= wealth.value < inf
        assert 0 <= late.value < inf
    assert isclose(log(wealth.value), log_wealth(blocks, null, side), abs_tol=1e-6)


@given(BLOCKS, NULLS, NULLS)
def test_bolder_null_claim_is_refuted_no_later_than_a_weaker_claim(
    blocks: list[Block], one: float, other: float
) -> None:
    low, high = sorted([one, other])
    assert log_wealth(blocks, low, ABOVE) >= log_wealth(blocks, high, ABOVE) - 1e-9
    assert log_wealth(blocks, high, BELOW) >= log_wealth(blocks, low, BELOW) - 1e-9


@pytest.mark.parametrize("kind", [EProcess, ChangeDetector])
def test_wealth_of_an_e_process_stays_finite_however_much_is_won(kind: type[EProcess]) -> None:
    wealth = kind(0.0, ABOVE)
    for _ in range(5_000):
        wealth.update(Block(1.0, 4.0, 1.0))
    assert isfinite(wealth.value)
    assert wealth.value > 1e100


def test_change_detector_finds_a_late_change_that_the_e_process_misses() -> None:
    early, late = EProcess(0.0, ABOVE), ChangeDetector(0.0, ABOVE)
    for block in [Block(-0.3, 1.0, 1.0)] * 200 + [Block(0.5, 1.0, 1.0)] * 60:
        early.update(block)
        late.update(block)
    assert early.value < 1
    assert late.value > 20


@given(FULL_REACH, MISTAKES)
def test_confidence_bounds_are_where_the_e_process_refutes_the_null(
    blocks: list[Block], mistakes: float
) -> None:
    lower, upper = (
        difference_bound(blocks, mistakes, ABOVE),
        difference_bound(blocks, mistakes, BELOW),
    )
    needed = log(1 / mistakes)
    assert -1 <= lower < upper <= 1
    if lower > -1:
        assert log_wealth(blocks, lower, ABOVE) >= needed
    if upper < 1:
        assert log_wealth(blocks, upper, BELOW) >= needed
    assert log_wealth(blocks, lower + 1 / STEPS, ABOVE) < needed
    assert log_wealth(blocks, upper - 1 / STEPS, BELOW) < needed
    turned = [block._replace(difference=-block.difference) for block in blocks]
    assert difference_bound(turned, mistakes, ABOVE) == -upper


def test_confidence_bounds_close_in_on_the_mean_block_difference() -> None:
    blocks = [Block(difference, 1.0, 1.0) for difference in (0.6, -0.2)] * 1000
    lower, upper = difference_bound(blocks, 0.05, ABOVE), difference_bound(blocks, 0.05, BELOW)
    assert 0.15 <= lower < 0.2 < upper <= 0.25
