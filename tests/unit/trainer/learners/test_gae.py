"""GAE over an episode's calls, against pencil and paper and against its own limits."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.learners.losses.ppo import (
    ValuedCall,
    call_rewards,
    episode_advantages,
    estimate_gae,
    explained_variance,
    normalise_advantages,
)

figures = st.floats(min_value=-4.0, max_value=4.0)
shares = st.floats(min_value=0.0, max_value=1.0)


def call(r_total: float, *values: float) -> ValuedCall:
    return ValuedCall(r_total=r_total, values=values, rewards=(0.0,) * len(values))


@st.composite
def calls(draw: st.DrawFn) -> list[ValuedCall]:
    found = []
    for _ in range(draw(st.integers(1, 4))):
        size = draw(st.integers(1, 5))
        one = st.lists(figures, min_size=size, max_size=size)
        found.append(ValuedCall(draw(figures), draw(one), draw(one)))
    return found


def test_advantages_of_an_episode_with_one_call_match_a_calculation_by_hand() -> None:
    # δ = (0 + 0.4 − 0.5, 0 + 0.2 − 0.4, 1 + 0 − 0.2) = (−0.1, −0.2, 0.8), λ = 0.5
    (got,) = episode_advantages([call(1.0, 0.5, 0.4, 0.2)], 0.5)
    assert got == pytest.approx([-0.1 + 0.5 * 0.2, -0.2 + 0.5 * 0.8, 0.8], abs=1e-12)


def test_advantages_of_an_episode_with_two_calls_match_a_calculation_by_hand() -> None:
    # Identical credit: 0 after the first call, 1 after the second.
    # δ = (0.3 − 0.2, 0 + 0.5 − 0.3, 1 − 0.5) = (0.1, 0.2, 0.5), λ = 0.8
    first, second = episode_advantages([call(1.0, 0.2, 0.3), call(1.0, 0.5)], 0.8)
    assert second == pytest.approx([0.5], abs=1e-12)
    last = 0.2 + 0.8 * 0.5
    assert first == pytest.approx([0.1 + 0.8 * last, last], abs=1e-12)


@pytest.mark.parametrize(
    ("totals", "paid"),
    [
        ([0.7], [0.7]),
        # Identical: once, at the end.
        ([1.0, 1.0, 1.0], [0.0, 0.0, 1.0]),
        # Rewards of 1.25, 1.15 and 1.2 for single calls.
        ([1.25, 1.15, 1.2], [0.1, -0.05, 1.2]),
        ([0.0, 1.0], [-1.0, 1.0]),
    ],
)
def test_reward_of_each_call_is_the_difference_of_returns(
    totals: list[float], paid: list[float]
) -> None:
    assert call_rewards(totals) == pytest.approx(paid, abs=1e-12)


@given(calls())
def test_advantage_with_lambda_1_is_return_less_value(chain: list[ValuedCall]) -> None:
    got = episode_advantages(chain, 1.0)
    for number, (one, advantages) in enumerate(zip(chain, got, strict=True)):
        later = sum(sum(other.rewards) for other in chain[number + 1 :])
        for token, advantage in enumerate(advantages):
            wanted = one.r_total + sum(one.rewards[token:]) + later - one.values[token]
            assert advantage == pytest.approx(wanted, abs=1e-9)


@given(calls())
def test_advantage_with_lambda_0_is_the_temporal_difference(
    chain: list[ValuedCall],
) -> None:
    got = [a for row in episode_advantages(chain, 0.0) for a in row]
    values = [value for one in chain for value in one.values]
    ends = [t == len(one.values) - 1 for one in chain for t in range(len(one.values))]
    paid = iter(call_rewards([one.r_total for one in chain]))
    own = [reward for one in chain for reward in one.rewards]
    for token, (value, after) in enumerate(pairwise([*values, 0.0])):
        reward = own[token] + (next(paid) if ends[token] else 0.0)
        wanted = reward + after - value
        assert got[token] == pytest.approx(wanted, abs=1e-9)


@given(st.lists(figures, min_size=1, max_size=12), shares, st.data())
def test_recursion_of_gae_equals_the_explicit_sum(
    rewards: list[float], trace: float, data: st.DataObject
) -> None:
    size = len(rewards)
    values = data.draw(st.lists(figures, min_size=size, max_size=size))
    following = [*values[1:], 0.0]
    deltas = [r + v - w for r, v, w in zip(rewards, following, values, strict=True)]
    wanted = [
        sum(trace ** (late - step) * deltas[late] for late in range(step, size))
        for step in range(size)
    ]
    assert estimate_gae(rewards, values, trace) == pytest.approx(wanted, abs=1e-9)


def test_episode_weighs_the_same_in_normalised_advantages_with_any_number_of_tokens() -> None:
    # Weighted mean 1, deviations ±1 each with half of the weight.
    assert normalise_advantages([[2.0], [0.0] * 9], [0.5, 0.5], 0.1) == [[1.0], [-1.0] * 9]


def test_normalised_advantages_of_a_small_spread_are_not_blown_up() -> None:
    assert normalise_advantages([[0.51], [0.49]], [0.5, 0.5], 0.1) == [
        [pytest.approx(0.1)],
        [pytest.approx(-0.1)],
    ]


def test_explained_variance_is_1_for_exact_and_0_for_constant_values() -> None:
    returns = [[1.0], [0.0]]
    assert explained_variance([[1.0], [0.0]], returns, [1.0, 1.0]) == 1.0
    assert explained_variance([[0.3], [0.3]], returns, [1.0, 1.0]) == pytest.approx(0.0)
    assert explained_variance([[0.3], [0.3]], [[1.0], [1.0]], [1.0, 1.0]) is None
