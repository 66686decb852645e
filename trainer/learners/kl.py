"""KL to the base model: the same weights with the adapter switched off.

In the loss it is the k3 estimator (Schulman, "Approximating KL divergence", 2020; GRPO,
arXiv:2402.03300 §4.1.1), weighted like the rest of the loss; TRL's own `beta` is not. In
the reward it is log π − log π_base of each sampled token (arXiv:1909.08593 §2), π being
the policy at the update's start. Both are at the temperature that the row was sampled at.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from trainer.recipe_parts import KlPart
from trainer.rows import Row, RowKey

# A figure of each sampled token, (S,), by row.
ByRow = dict[RowKey, list[float]]


def by_row(rows: Sequence[Row], values: Tensor) -> ByRow:
    """(M,) of a micro-batch, cut into its rows."""
    remaining = iter(values.tolist())
    return {row.key: [next(remaining) for _ in row.sampled_ids] for row in rows}


def concatenated(
    rows: Sequence[Row], found: Mapping[RowKey, Sequence[float]], device: Any
) -> Tensor:
    """The rows' figures one behind the other, (M,)."""
    return torch.tensor([value for row in rows for value in found[row.key]], device=device)


def token_weights(rows: Sequence[Row], device: Any) -> Tensor:
    """Each sampled token's share of the loss, (M,): a row's weight over its tokens."""
    return torch.tensor(
        [row.weight / len(row.sampled_ids) for row in rows for _ in row.sampled_ids],
        device=device,
    )


def k3(policy: Tensor, reference: Tensor) -> Tensor:
    """Estimate of KL(policy ‖ reference) from each token that the policy sampled."""
    difference = reference - policy
    return difference.exp() - difference - 1.0


class KlToBase:
    """What it costs to differ from the base model, over one update."""

    def __init__(self, rule: KlPart) -> None:
        self.rule = rule
        self.is_wanted = rule.coefficient > 0
        self.in_reward = self.is_wanted and rule.place == "reward"
        self.begin({})

    def begin(self, reference: ByRow) -> None:
        """Start an update, whose rows the base model gives these log-probabilities."""
        self._reference = reference
        self._seen = 0.0
        self._weight = 0.0

    def rewards(self, row: Row, policy: Sequence[float]) -> list[float]:
        """What each token of a row earns by how far it is from the base, (S,)."""
        if not self.in_reward:
            return [0.0] * len(policy)
        pairs = zip(policy, self._reference[row.key], strict=True)
        return [-self.rule.coefficient * (here - there) for here, there in pairs]

    def loss(self, rows: Sequence[Row], policy: Tensor) -> Tensor:
        """The term of a micro-batch's loss; zero where the reward pays. `policy` is (M,)."""
        if not self.is_wanted:
            return policy.new_zeros(())
        weights = token_weights(rows, policy.device)
        reference = concatenated(rows, self._reference, policy.device)
        divergence = (weights * k3(policy, reference)).sum()
        self._seen += float(divergence.detach())
        self._weight += float(weights.sum())
        return divergence * (0.0 if self.in_reward else self.rule.coefficient)

    def figures(self) -> dict[str, float]:
        """`kl_to_base` in nats a token, over the update's passes."""
        return {"kl_to_base": self._seen / self._weight} if self._weight else {}


def with_kl_rewards(rows: Sequence[Row], rewards: Mapping[RowKey, float]) -> list[Row]:
    """Rows whose advantages include what they pay for leaving the base (for GRPO).

    `rewards` are summed over a row's tokens and taken against their mean over the update, by
    the rows' weights: a baseline, without which every sample would be pushed down. Credit
    has long divided the rewards by their spread, so the coefficient is in units of the
    advantage.
    """
    whole = sum(row.weight for row in rows)
    mean = sum(rewards[row.key] * row.weight for row in rows) / whole
    return [
        msgspec.structs.replace(row, advantage=row.advantage + rewards[row.key] - mean)
        for row in rows
    ]
