"""Tell which episodes the policy has moved too far away from (pure).

Staleness is measured: by the ratios w = policy/sampled of an episode's tokens, as the loss takes
them (truncated at `off_policy.ratio_cap`), their effective sample size (Σw)² / (n·Σw²) says what
share of its n tokens the episode is worth (Kish, 1965). The recipe's limit is
`off_policy.min_effective_sample`; `claim.max_staleness`, in versions, is for
`store.updates.expiry`. The size does not depend on how long an episode is: without the truncation
one token in a thousand would decide about all the others. A mean that is off is another matter, and
bounded by call (`trainer.learners.off_policy`).
"""

from collections.abc import Mapping, Sequence
from math import exp, fsum, isfinite, log
from typing import Any, Final
from uuid import UUID

from trainer.batches.rows import Row

# The reason of such episodes; and where an update's metrics have their effective sample sizes.
OFF_POLICY: Final = "off_policy"
FAR: Final = "off_policy_episodes"
SMALLEST: Final = "smallest_effective_sample"


def effective_share(log_ratios: Sequence[float], cap: float) -> float:
    """Return the effective sample size of tokens with log policy/sampled, as a share of them.

    Ratios are truncated at `cap`. The share of tokens that the policy never gives is 0.
    """
    highest = log(cap)
    truncated = [min(ratio, highest) for ratio in log_ratios]
    # A factor that all weights share changes nothing, and keeps the squares from overflowing.
    largest = max(0.0, *truncated)
    weights = [exp(ratio - largest) for ratio in truncated]
    squares = fsum(weight * weight for weight in weights)
    return fsum(weights) ** 2 / (len(weights) * squares) if squares else 0.0


def sampled_by_others(rows: Sequence[Row], parent: int) -> list[Row]:
    """Return the rows that another version than `parent`, which is trained on, sampled."""
    return [row for row in rows if row.version != parent]


def shares_by_episode(
    rows: Sequence[Row], policy: Sequence[Sequence[float]], cap: float
) -> dict[UUID, float]:
    """Return the effective share of each episode's tokens in `rows`.

    `policy` are the log-probabilities (S,) of each row's sampled tokens under the policy.
    """
    log_ratios: dict[UUID, list[float]] = {}
    for row, own in zip(rows, policy, strict=True):
        pairs = zip(own, row.sampled_logprobs, strict=True)
        log_ratios.setdefault(row.episode_id, []).extend(new - old for new, old in pairs)
    return {episode: effective_share(ratios, cap) for episode, ratios in log_ratios.items()}


def too_far(shares: Mapping[UUID, float], least: float) -> dict[UUID, float]:
    """Return the episodes whose share is below `least`.

    One that is no number is not among them: the learner says what is wrong with it.
    """
    return {episode: share for episode, share in shares.items() if share < least}


def smallest_in(shares: Mapping[UUID, float]) -> dict[str, float]:
    """Return the metric of an update with these shares: the smallest that is a number, if any."""
    numbers = [share for share in shares.values() if isfinite(share)]
    return {SMALLEST: min(numbers)} if numbers else {}


def far_in(metrics: Mapping[str, Any]) -> dict[UUID, float]:
    """Return the episodes that an update recorded as too far, and their shares."""
    return {UUID(episode): share for episode, share in metrics.get(FAR, {}).items()}
