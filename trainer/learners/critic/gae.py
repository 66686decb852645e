"""Estimate advantages over an episode's calls by GAE (pure, float64).

GAE (arXiv:1506.02438 §3) on one chain of tokens: the trained calls of an episode by position.
The state after a call's last token is the next trained call's prompt; calls between them that
are not trained belong to the environment.

    δ_t = reward_t + V_{t+1} − V_t          V after the last token is 0
    A_t = δ_t + λ · A_{t+1}

Nothing is discounted: an episode's end is worth as much to its first call as to its last. λ counts
tokens. Rewards stand on the last token of a call. They are derived from the returns G_k that credit
assignment gives:

    reward of call k = G_k − G_{k+1},  of the last call G_K

The return of every token is then its call's r_total, whatever the assignment: identical credit puts
one reward at the episode's end, rewards of single calls one on each call.
"""

from collections.abc import Sequence
from itertools import chain, groupby, pairwise
from math import fsum, sqrt
from typing import NamedTuple

from trainer.batches import Row


class ValuedCall(NamedTuple):
    """Hold one trained call of S sampled tokens, with its return and the critic's values.

    `r_total` is the call's return from credit assignment. Shapes: `values` (S,), V before each
    token; `rewards` (S,), each token's own reward (the KL penalty, or zeros).
    """

    r_total: float
    values: Sequence[float]
    rewards: Sequence[float]


def call_rewards(totals: Sequence[float]) -> list[float]:
    """Return each call's reward, such that the returns are `totals`, (K,)."""
    return [here - after for here, after in pairwise([*totals, 0.0])]


def estimate(rewards: Sequence[float], values: Sequence[float], trace: float) -> list[float]:
    """Return the GAE of one chain of T tokens; all shapes are (T,), `trace` is λ."""
    advantages = [0.0] * len(rewards)
    value_after, advantage_after = 0.0, 0.0
    for step in reversed(range(len(rewards))):
        delta = rewards[step] + value_after - values[step]
        advantages[step] = delta + trace * advantage_after
        value_after, advantage_after = values[step], advantages[step]
    return advantages


def episode_advantages(calls: Sequence[ValuedCall], trace: float) -> list[list[float]]:
    """Return the advantage of every token of an episode's trained calls, given by position."""
    last_rewards = call_rewards([call.r_total for call in calls])
    rewards = [
        reward + (last_reward if token == len(call.rewards) - 1 else 0.0)
        for call, last_reward in zip(calls, last_rewards, strict=True)
        for token, reward in enumerate(call.rewards)
    ]
    values = list(chain.from_iterable(call.values for call in calls))
    remaining = iter(estimate(rewards, values, trace))
    return [[next(remaining) for _ in call.values] for call in calls]


def row_advantages(
    rows: Sequence[Row],
    values: Sequence[Sequence[float]],
    rewards: Sequence[Sequence[float]],
    *,
    trace: float,
    by_agent: bool,
) -> list[list[float]]:
    """Return the advantage of every token of an update's rows, which come in any order.

    `values` and `rewards` hold one sequence (S,) for each row, and so does the result. With
    `by_agent` the calls of each agent of an episode are a chain of their own: where each agent
    has its own return, the other agents belong to its environment.
    """

    def chain_of(index: int) -> tuple[str, str]:
        """Return the chain that a row belongs to."""
        row = rows[index]
        return str(row.episode_id), row.agent if by_agent else ""

    by_row: list[list[float]] = [[] for _ in rows]
    order = sorted(range(len(rows)), key=lambda index: (*chain_of(index), rows[index].position))
    for _, group in groupby(order, key=chain_of):
        indices = list(group)
        calls = [ValuedCall(rows[i].r_total, values[i], rewards[i]) for i in indices]
        for index, advantages in zip(indices, episode_advantages(calls, trace), strict=True):
            by_row[index] = advantages
    return by_row


def normalised(
    rows: Sequence[Sequence[float]], weights: Sequence[float], smallest_spread: float
) -> list[list[float]]:
    """Return the advantages minus their mean, divided by their spread.

    Mean and variance weigh tokens as the loss does: a row's weight is divided among its tokens,
    so that a long call counts no more than a short one. A spread below `smallest_spread` is
    replaced by it.
    """
    mean, variance = _moments(rows, weights)
    spread = max(sqrt(variance), smallest_spread)
    return [[(advantage - mean) / spread for advantage in row] for row in rows]


def explained_variance(
    values: Sequence[Sequence[float]], returns: Sequence[Sequence[float]], weights: Sequence[float]
) -> float | None:
    """Return 1 − Var(return − V) / Var(return), or None if the returns do not vary.

    1 is a perfect critic, 0 one that is no better than a constant.
    """
    errors = [
        [target - value for value, target in zip(row, targets, strict=True)]
        for row, targets in zip(values, returns, strict=True)
    ]
    _, variance = _moments(returns, weights)
    _, unexplained = _moments(errors, weights)
    return 1.0 - unexplained / variance if variance > 0.0 else None


def _moments(rows: Sequence[Sequence[float]], weights: Sequence[float]) -> tuple[float, float]:
    """Return weighted mean and variance over tokens; a row's weight is divided among its tokens."""
    shares = [
        (value, weight / len(row))
        for row, weight in zip(rows, weights, strict=True)
        for value in row
    ]
    total = fsum(share for _, share in shares)
    mean = fsum(value * share for value, share in shares) / total
    return mean, fsum((value - mean) ** 2 * share for value, share in shares) / total
