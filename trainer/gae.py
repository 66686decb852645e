"""Generalised advantage estimation over an episode's calls (pure, float64).

GAE (arXiv:1506.02438 §3) on one chain of tokens: the trained calls of an episode by
position, the state after a call's last token being the next call's prompt. Calls between
them that are not trained belong to the environment.

    δ_t = reward_t + γ_t · V_{t+1} − V_t          V after the last token is 0
    A_t = δ_t + γ_t · λ · A_{t+1}

A call is one step of the episode (Agent Lightning, arXiv:2508.03680 §3.1), so that γ_t is
`gamma` on a call's last token and 1 within it; λ counts tokens. Rewards are paid on the last
token of a call, and are what the credit assignment's returns G_k come down to:

    reward of call k = G_k − G_{k+1},  of the last call G_K

With γ = 1 the return of every token is thus its call's r_total, whatever the assignment:
identical credit pays once, at the episode's end; step-wise credit pays each step's share.
"""

from collections.abc import Sequence
from itertools import chain, groupby, pairwise
from math import fsum, sqrt
from typing import NamedTuple

from trainer.rows import Row


class ValuedCall(NamedTuple):
    """One trained call: its credited return, and of each of its S tokens the critic's view.

    Shapes: `values` (S,), V before the token; `rewards` (S,), what the token earns by itself
    (the cost of leaving the base model; zeros without).
    """

    r_total: float
    values: Sequence[float]
    rewards: Sequence[float]


def call_rewards(totals: Sequence[float]) -> list[float]:
    """What each call pays, for the undiscounted returns to be `totals`."""
    return [here - after for here, after in pairwise([*totals, 0.0])]


def estimate(
    rewards: Sequence[float], values: Sequence[float], discounts: Sequence[float], trace: float
) -> list[float]:
    """GAE of one chain of T steps; all shapes (T,), `trace` is λ."""
    advantages = [0.0] * len(rewards)
    value_after, advantage_after = 0.0, 0.0
    for step in reversed(range(len(rewards))):
        delta = rewards[step] + discounts[step] * value_after - values[step]
        advantages[step] = delta + discounts[step] * trace * advantage_after
        value_after, advantage_after = values[step], advantages[step]
    return advantages


def episode_advantages(
    calls: Sequence[ValuedCall], gamma: float, trace: float
) -> list[list[float]]:
    """Advantages of every token of an episode's trained calls, which come by position."""
    paid = call_rewards([call.r_total for call in calls])
    rewards = [
        reward + (pay if token == len(call.rewards) - 1 else 0.0)
        for call, pay in zip(calls, paid, strict=True)
        for token, reward in enumerate(call.rewards)
    ]
    discounts = [
        gamma if token == len(call.values) - 1 else 1.0
        for call in calls
        for token in range(len(call.values))
    ]
    values = list(chain.from_iterable(call.values for call in calls))
    remaining = iter(estimate(rewards, values, discounts, trace))
    return [[next(remaining) for _ in call.values] for call in calls]


def row_advantages(
    rows: Sequence[Row],
    values: Sequence[Sequence[float]],
    rewards: Sequence[Sequence[float]],
    *,
    gamma: float,
    trace: float,
    by_agent: bool,
) -> list[list[float]]:
    """Advantages of every token of an update's rows, which come in any order.

    `by_agent` chains the calls of each agent of an episode by themselves: where every agent
    has a return of its own, the others belong to its environment.
    """

    def chain_of(index: int) -> tuple[str, str]:
        row = rows[index]
        return str(row.episode_id), row.agent if by_agent else ""

    found: list[list[float]] = [[] for _ in rows]
    order = sorted(range(len(rows)), key=lambda index: (*chain_of(index), rows[index].position))
    for _, group in groupby(order, key=chain_of):
        indices = list(group)
        calls = [ValuedCall(rows[i].r_total, values[i], rewards[i]) for i in indices]
        for index, advantages in zip(indices, episode_advantages(calls, gamma, trace), strict=True):
            found[index] = advantages
    return found


def normalised(
    rows: Sequence[Sequence[float]], weights: Sequence[float], smallest_spread: float
) -> list[list[float]]:
    """Advantages less their mean, over their spread; a row's tokens share the row's weight.

    Weights are those of the loss, so that a long call counts no more than a short one.
    """
    mean, variance = _moments(rows, weights)
    spread = max(sqrt(variance), smallest_spread)
    return [[(advantage - mean) / spread for advantage in row] for row in rows]


def explained_variance(
    values: Sequence[Sequence[float]], returns: Sequence[Sequence[float]], weights: Sequence[float]
) -> float | None:
    """1 − Var(return − V) / Var(return): 1 is a perfect critic, 0 a constant; None undefined."""
    errors = [
        [target - value for value, target in zip(row, targets, strict=True)]
        for row, targets in zip(values, returns, strict=True)
    ]
    _, variance = _moments(returns, weights)
    _, unexplained = _moments(errors, weights)
    return 1.0 - unexplained / variance if variance > 0.0 else None


def _moments(rows: Sequence[Sequence[float]], weights: Sequence[float]) -> tuple[float, float]:
    """Weighted mean and variance over tokens, each row's weight divided among its tokens."""
    shares = [
        (value, weight / len(row))
        for row, weight in zip(rows, weights, strict=True)
        for value in row
    ]
    whole = fsum(share for _, share in shares)
    mean = fsum(value * share for value, share in shares) / whole
    return mean, fsum((value - mean) ** 2 * share for value, share in shares) / whole
