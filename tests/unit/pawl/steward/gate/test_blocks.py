"""Blocks: over all ways to give the arms out, the difference's mean is the effect, exactly."""

from itertools import combinations
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.steward.gate.betting import (
    FEWEST,
    MOST,
    MOST_FAMILIES,
    Block,
    Blocks,
    Centres,
    block_size,
)

SIZE = 8
UNIT = st.floats(0, 1)
FAMILIES = st.sampled_from(["a", "b", "c"])
STREAM = st.lists(st.tuples(st.booleans(), FAMILIES, UNIT), min_size=SIZE, max_size=5 * SIZE)


def last_block(stream: list[tuple[bool, str, float]]) -> Block | None:
    blocks = Blocks(SIZE)
    found = None
    for tested, family, value in stream:
        found = blocks.add(tested, family, value)
    return found


@pytest.mark.parametrize("tested", range(1, SIZE))
def test_the_mean_over_all_assignments_is_the_effect_whatever_happens_in_the_block(
    tested: int,
) -> None:
    # Families, a drift and an effect of their own for each episode; the blocks before it
    # taught the families' means.
    before = [(number % 3 == 0, "abc"[number % 3], (number % 5) / 4) for number in range(2 * SIZE)]
    families = "aabcabbc"
    without = [0.0, 0.1, 0.5, 0.3, 0.6, 0.7, 0.65, 0.9]
    with_it = [0.2, 0.0, 0.9, 0.3, 1.0, 0.4, 0.95, 0.8]
    shown = []
    for chosen in combinations(range(SIZE), tested):
        block = last_block(
            before
            + [
                (at in chosen, families[at], (with_it if at in chosen else without)[at])
                for at in range(SIZE)
            ]
        )
        assert block is not None
        shown.append(block.difference)
    effect = fmean(with_it) - fmean(without)
    assert fmean(shown) == pytest.approx(effect, abs=1e-12)


@given(STREAM)
def test_no_difference_is_beyond_its_reach(stream: list[tuple[bool, str, float]]) -> None:
    blocks = Blocks(SIZE)
    for tested, family, value in stream:
        block = blocks.add(tested, family, value)
        if block is not None:
            assert abs(block.difference) <= block.reach + 1e-12
            assert 1 <= block.reach <= 2


@given(STREAM)
def test_arms_that_change_places_turn_the_sign(stream: list[tuple[bool, str, float]]) -> None:
    whole = stream[: len(stream) - len(stream) % SIZE]
    one = last_block(whole)
    other = last_block([(not tested, family, value) for tested, family, value in whole])
    if one is None or other is None:
        assert one is other
    else:
        assert one.difference == pytest.approx(-other.difference)
        assert (one.weight, one.reach) == (other.weight, other.reach)


@pytest.mark.parametrize("tested", range(1, SIZE - 1))
def test_a_block_that_is_closed_early_shows_the_effect_on_average_too(tested: int) -> None:
    without, with_it = [0.0, 0.1, 0.5, 0.3, 0.6, 0.7], [0.2, 0.0, 0.9, 0.3, 1.0, 0.4]
    shown = []
    for chosen in combinations(range(len(without)), tested):
        blocks = Blocks(SIZE)
        for at, values in enumerate(zip(without, with_it, strict=True)):
            assert blocks.add(at in chosen, "a", values[at in chosen]) is None
        block = blocks.close()
        if block is None:
            assert tested == len(without)
            continue
        shown.append(block.difference)
        assert blocks.close() is None
    if shown:
        assert fmean(shown) == pytest.approx(fmean(with_it) - fmean(without), abs=1e-12)


def test_a_block_of_one_arm_says_nothing_and_is_over() -> None:
    blocks = Blocks(SIZE)
    assert [blocks.add(False, "a", 1.0) for _ in range(SIZE)] == [None] * SIZE
    found = [blocks.add(number == 0, "a", 0.5) for number in range(SIZE)]
    assert found[:-1] == [None] * (SIZE - 1)
    block = found[-1]
    assert block is not None
    assert block == Block(pytest.approx(0.0), weight=7 / 8, reach=1.0)


def test_families_that_differ_do_not_spread_the_differences() -> None:
    stream = [(number % 4 == 1, "ab"[number % 2], float(number % 2)) for number in range(40 * SIZE)]
    block = last_block(stream)
    assert block is not None
    assert abs(block.difference) < 0.1


@pytest.mark.parametrize(
    ("tested", "other", "size"),
    [(0.1, 0.9, 17), (0.5, 0.5, FEWEST), (0.001, 0.999, MOST), (0.1, 0.0, MOST), (0.0, 0.0, MOST)],
)
def test_the_rarer_an_arm_the_larger_the_blocks(tested: float, other: float, size: int) -> None:
    assert block_size(tested, other) == size


def test_a_family_is_centred_by_all_while_it_is_new() -> None:
    centres = Centres()
    assert centres.of("a") == 0.5
    for _ in range(1000):
        centres.add("a", 0.9)
    assert centres.of("a") == pytest.approx(0.9, abs=0.01)
    assert centres.of("new") == pytest.approx(0.9, abs=0.01)


def test_families_past_the_bound_are_centred_by_all() -> None:
    centres = Centres()
    for number in range(MOST_FAMILIES):
        centres.add(str(number), 0.0)
    for _ in range(1000):
        centres.add("one more", 1.0)
    assert centres.of("one more") == pytest.approx(1000 / (MOST_FAMILIES + 1000), abs=0.01)
