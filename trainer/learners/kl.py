"""Measure and penalise the KL divergence of the policy from its base model.

The base model is the same model with the adapter switched off. The recipe's `[kl]` puts the penalty
into the loss or into the reward. In the loss it is the k3 estimator (Schulman, "Approximating KL
divergence", 2020; GRPO, arXiv:2402.03300 §4.1.1), weighted like the rest of the loss, unlike TRL's
own `beta`. k3 assumes tokens that the policy sampled; tokens of other versions are weighted by the
truncated ratio policy/sampled of the loss (DeepSeek-V3.2, arXiv:2512.02556 §3.1). In the reward it
is log π − log π_base of each sampled token (arXiv:1909.08593 §2), where π is the policy before the
update's first step. The row's sampling settings shape both distributions, so that the policy stays
near the base as served with these settings; top-k, top-p and min-p apply to each by itself. The
sampled token counts as a survivor in both (`trainer.learners.replay.shaping`), so that neither
log-probability is infinite.

After an update `kl_by_row` measures KL(policy ‖ base), exact over the vocabulary and at temperature
one, on some of the calls that the update trained on. This divergence on the trained tasks predicts
how much the model forgets of other tasks (arXiv:2509.04259). Measuring changes no weights and draws
no random numbers: hashes of the token ids choose the calls.
"""

import math
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from trainer.batches import Layout, Row, RowKey
from trainer.errors import Unusable
from trainer.learners.kernels.head import Head, head_kl, logits_kl
from trainer.learners.scoring import states_of, whole_logits
from trainer.recipes.recipe import KlOptions

# One in so many of an update's tokens is measured, within the bounds below. Measuring a token costs
# two forward passes; training on it costs at least as much as three.
MEASURED_PART: Final = 16
FEWEST_TOKENS: Final = 512
MOST_TOKENS: Final = 16384
# One value for each sampled token, (S,), by row.
ByRow = dict[RowKey, list[float]]


def cut_by_row(rows: Sequence[Row], values: Tensor) -> ByRow:
    """Cut the values of a micro-batch's sampled tokens, (M,), into its rows."""
    remaining = iter(values.tolist())
    return {row.key: [next(remaining) for _ in row.sampled_ids] for row in rows}


def concatenate(
    rows: Sequence[Row], values: Mapping[RowKey, Sequence[float]], device: Any
) -> Tensor:
    """Return the values of all sampled tokens, row after row, as one tensor (M,)."""
    return torch.tensor([value for row in rows for value in values[row.key]], device=device)


def token_weights(rows: Sequence[Row], device: Any) -> Tensor:
    """Return each sampled token's weight in the loss, (M,): the row's weight / its tokens."""
    return torch.tensor(
        [row.weight / len(row.sampled_ids) for row in rows for _ in row.sampled_ids],
        device=device,
    )


def k3(policy: Tensor, reference: Tensor) -> Tensor:
    """Return the k3 estimate of KL(policy ‖ reference) for each token that the policy sampled.

    With d = log reference − log policy it is exp(d) − d − 1: unbiased and never negative.
    """
    difference = reference - policy
    return difference.exp() - difference - 1.0


class KlToBase:
    """Compute the KL penalty of one update, in the loss or in the reward, as the recipe says."""

    def __init__(self, rule: KlOptions, ratio_cap: float | None) -> None:
        """Store the recipe's `[kl]`, and the cap of the loss's ratios (None: it has no ratios)."""
        self.rule = rule
        self._ratio_cap = ratio_cap
        self.is_wanted = rule.coefficient > 0
        self.in_reward = self.is_wanted and rule.place == "reward"
        self.begin({})

    def begin(self, reference: ByRow) -> None:
        """Start an update; `reference` holds its rows' log-probabilities under the base model."""
        self._reference = reference
        self._seen = 0.0
        self._weight = 0.0

    def rewards(self, row: Row, policy: Sequence[float]) -> list[float]:
        """Return each token's KL reward, (S,): −coefficient · (log π − log π_base), or zeros."""
        if not self.in_reward:
            return [0.0] * len(policy)
        pairs = zip(policy, self._reference[row.key], strict=True)
        return [-self.rule.coefficient * (own - base) for own, base in pairs]

    def loss(self, rows: Sequence[Row], policy: Tensor) -> Tensor:
        """Return the KL term of a micro-batch's loss; zero unless the penalty is in the loss.

        `policy` (M,) are the log-probabilities of the micro-batch's sampled tokens.
        """
        if not self.is_wanted:
            return policy.new_zeros(())
        weights = token_weights(rows, policy.device)
        reference = concatenate(rows, self._reference, policy.device)
        divergence = (weights * self._ratios(rows, policy) * k3(policy, reference)).sum()
        self._seen += float(divergence.detach())
        self._weight += float(weights.sum())
        return divergence * (0.0 if self.in_reward else self.rule.coefficient)

    def _ratios(self, rows: Sequence[Row], policy: Tensor) -> Tensor | float:
        """Return each token's truncated ratio policy/sampled, (M,), without a gradient."""
        if self._ratio_cap is None:
            return 1.0
        sampled = {row.key: row.sampled_logprobs for row in rows}
        log_ratios = policy.detach() - concatenate(rows, sampled, policy.device)
        return log_ratios.exp().clamp(max=self._ratio_cap)

    def figures(self) -> dict[str, float]:
        """Return `kl_penalised`, in nats a token; empty without a KL penalty.

        It is the mean k3 by the tokens' weights and ratios, without the coefficient.
        """
        return {"kl_penalised": self._seen / self._weight} if self._weight else {}


def with_kl_rewards(rows: Sequence[Row], rewards: Mapping[RowKey, float]) -> list[Row]:
    """Return the rows with their KL reward added to the advantage (for GRPO).

    `rewards` are sums over a row's tokens. Their mean over the update, weighted by the rows, is
    subtracted: without this baseline every sample would be pushed down. Credit assignment has
    already divided rewards by their spread, so the coefficient is in units of the advantage.
    Corrections get no KL reward, because the policy did not sample them.
    """
    own = [row for row in rows if not row.is_correction]
    total = sum(row.weight for row in own) or 1.0
    mean = sum(rewards[row.key] * row.weight for row in own) / total
    return [
        row
        if row.is_correction
        else msgspec.structs.replace(row, advantage=row.advantage + rewards[row.key] - mean)
        for row in rows
    ]


def measured_rows(rows: Sequence[Row], fewest: int | None = None) -> list[Row]:
    """Return the rows to measure: at least one, and otherwise up to a bound of tokens.

    The bound is one in `MEASURED_PART` of all tokens, prompts included, but at least `fewest`
    (None: `FEWEST_TOKENS`) and at most `MOST_TOKENS`. Rows are taken in the order of the hashes of
    their ids, so that the choice does not depend on the order of `rows`.
    """
    tokens = sum(row.size for row in rows)
    left = min(MOST_TOKENS, max(fewest or FEWEST_TOKENS, tokens // MEASURED_PART))
    chosen: list[Row] = []
    for row in sorted(rows, key=lambda row: blake2b(row.ids, digest_size=8).digest()):
        if chosen and row.size > left:
            break
        chosen.append(row)
        left -= row.size
    return chosen


@torch.no_grad()
def kl_by_row(model: Any, rows: Sequence[Row], *, layout: Layout) -> ByRow:
    """Return KL(policy ‖ base) before each sampled token, (S,) in nats, by row.

    `model` is a PEFT model in evaluation mode, prepared for `layout`.
    """
    if layout == "whole":
        return cut_by_row(rows, torch.cat([_whole_row_kl(model, row) for row in rows]))
    own, parents = states_of(model, rows, layout)
    with model.disable_adapter():
        base, _ = states_of(model, rows, layout)
    places = torch.tensor(parents, device=own.device)
    return cut_by_row(rows, head_kl(own[places], base[places], Head.of_model(model)))


def _whole_row_kl(model: Any, row: Row) -> Tensor:
    own = whole_logits(model, [row])[0]
    with model.disable_adapter():
        base = whole_logits(model, [row])[0]
    return logits_kl(own, base)


def kl_figures(
    rows: Sequence[Row], measured: Sequence[Mapping[RowKey, Sequence[float]]]
) -> dict[str, Any]:
    """Return `kl_to_base`, in nats a token over the sampled tokens of `rows`, and `kl_tokens`.

    `measured` has the values of `kl_by_row`, and `kl_tokens` is the number of these tokens.

    Raises:
        Unusable: the mean is not finite, because the policy's log-probabilities are not.
    """
    values = {key: own for part in measured for key, own in part.items()}
    each = [value for row in rows for value in values[row.key]]
    mean = math.fsum(each) / len(each)
    if not math.isfinite(mean):
        raise Unusable(f"the KL of the trained policy to its base model is {mean}: update dropped")
    return {"kl_to_base": mean, "kl_tokens": len(each)}
