"""Measure how far the policy in training is from the policies that sampled its rows.

Let d = log policy − log sampled, per token. A sequence whose geometric mean ratio exp(mean d)
(the sequence ratio of GSPO, arXiv:2507.18071 §4) is out of bounds carries no loss. The weights of
the other sequences do not grow in return; the loss truncates the ratios of their tokens.

The bounds depend on the length. The mean of T independent values of d deviates from 0 by about
1/√T: a mean that a reply of ten tokens has by chance is a sign of another policy in a reply of ten
thousand. So the bounds on mean d shrink as 1/√T (`OffPolicyOptions.sequence_bounds`). A systematic
difference between server and trainer does not shrink with T: it is measured first (`mean_drift`)
and subtracted from mean d. Otherwise all replies of 961 tokens would be out of bounds at a drift of
0.1 nats a token.

The divergence KL(sampled ‖ policy) is estimated by mean(exp(d) − 1 − d), never negative and
of low variance (k3; Schulman, "Approximating KL divergence", 2020,
http://joschu.net/blog/kl-approx.html). Before the first optimiser step the policy in
training *is* the newest version: rows that this version sampled differ by arithmetic alone,
which is called drift; older rows differ by drift and by staleness.
"""

from collections.abc import Callable, Sequence
from math import fsum
from typing import Any, Final
from uuid import UUID

import torch
from torch import Tensor

from store.records import Record
from trainer.batches import Row, RowKey
from trainer.errors import DriftOutOfBounds, Unusable

# Sums of a row above this may overflow when they are added over rows.
LARGEST_SUM: Final = 1e300


class RowComparison(Record, frozen=True, kw_only=True):
    """Sums over the sampled tokens of one row, with d = log policy − log sampled.

    `divergence` sums exp(d) − 1 − d, `distance` |d|, `ratios` exp(d), and `squared_ratios` exp(2d).
    `cut` counts the tokens whose ratio is truncated; `masked` says that the row carries no loss.
    `version` is None for a recomputed row, which says nothing about the server. `key` identifies
    the row, and `policy_logprobs` are the policy's log-probabilities, packed as in the database;
    both are optional.
    """

    version: int | None
    tokens: int
    divergence: float
    distance: float
    ratios: float
    squared_ratios: float
    cut: int
    masked: bool
    key: RowKey | None = None
    policy_logprobs: bytes = b""


def mean_drift(
    rows: Sequence[Row], policy: Sequence[Sequence[float]], newest: int | None, bound: float
) -> float:
    """Return the mean of d over tokens sampled by version `newest`, clamped to [−`bound`, 0].

    It estimates −KL(sampled ‖ policy) in nats a token; `policy` are the log-probabilities (S,) of
    the rows' sampled tokens under that same version. Without such tokens it is 0.
    """
    differences = [
        own - sampled
        for row, values in zip(rows, policy, strict=True)
        if row.version == newest and not (row.recomputed or row.is_correction)
        for own, sampled in zip(values, row.sampled_logprobs, strict=True)
    ]
    mean = fsum(differences) / len(differences) if differences else 0.0
    return min(0.0, max(-bound, mean))


def loss_mask(
    log_ratios: Tensor,
    mask: Tensor,
    least: Tensor | float,
    most: Tensor | float,
    drift: float = 0.0,
) -> Tensor:
    """Return 1 for each sequence that carries loss and 0 for the others, (B, 1).

    Shapes: `log_ratios` (d) and `mask` are (B, T). `least` and `most` bound exp(mean d − `drift`):
    numbers for all sequences, or (B, 1).
    """
    means = (log_ratios * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    ratios = (means - drift).exp()
    return ((ratios >= least) & (ratios <= most)).to(mask.dtype)


def compare_rows(
    log_ratios: Tensor, mask: Tensor, keeps: Tensor, versions: Sequence[int | None], cap: float
) -> list[RowComparison]:
    """Return one comparison for each row; `log_ratios` (d) and `mask` are (B, T).

    `keeps` (B, 1) is a `loss_mask`, and ratios above `cap` are truncated.
    """
    d = torch.where(mask.bool(), log_ratios.detach().double(), 0.0)
    ratios = d.exp() * mask
    columns = {
        "tokens": mask.sum(1).long(),
        "divergence": (d.exp() - 1 - d).sum(1),
        "distance": d.abs().sum(1),
        "ratios": ratios.sum(1),
        "squared_ratios": (ratios**2).sum(1),
        "cut": (ratios > cap).sum(1),
        "masked": keeps[:, 0] == 0,
    }
    by_row = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [
        RowComparison(version=version, **dict(zip(columns, sums, strict=True)))
        for version, sums in zip(versions, by_row, strict=True)
    ]


def can_be_summed(compared: Sequence[RowComparison]) -> bool:
    """Return whether the rows' sums are finite, and small enough to be added up."""
    return all(
        # False for NaN.
        row.divergence < LARGEST_SUM and row.squared_ratios < LARGEST_SUM
        for row in compared
    )


def checked_metrics(
    compared: Sequence[RowComparison], newest: int | None, bound: float
) -> dict[str, Any]:
    """Return an update's off-policy metrics (`off_policy_metrics`); none if no row was compared.

    Raises:
        DriftOutOfBounds: rows that version `newest` sampled drift by more than `bound`, in nats per
            token.
        Unusable: some rows are too far from the policy for their sums to be added up.
    """
    if not compared:
        return {}
    if not can_be_summed(compared):
        raise Unusable("some rows are too far from the policy: their ratios overflow")
    metrics = off_policy_metrics(compared, newest)
    if metrics["drift_kl"] is None or metrics["drift_kl"] <= bound:
        return metrics
    raise DriftOutOfBounds(
        f"the log-probabilities of version {newest} at the server and the trainer differ by"
        f" {metrics['drift_kl']:.3g} nats a token (off_policy.max_drift is {bound:g}): nothing was"
        " trained; check that the server has the same model, precision and --logprobs-mode",
        drifted_episodes(compared, newest, bound),
        metrics,
    )


def off_policy_metrics(compared: Sequence[RowComparison], newest: int | None) -> dict[str, Any]:
    """Return an update's off-policy metrics, JSON-ready; a metric that no row gives is None.

    - `drift_kl`, `drift_logp_mean_abs`: over the rows that version `newest` sampled (None: the
      policy in training is no version), in nats per token.
    - `staleness_kl`: the divergence of older rows minus the drift, in nats per token. Recomputed
      rows count in neither.
    - `effective_sample_size`: (Σw)² / (n·Σw²) over the ratios w of all n tokens before any is
      truncated (Kish), as a share of the tokens.
    - `ratio_cut_share`: the share of tokens with a truncated ratio.
    - `masked_share`: the share of rows that carry no loss.
    """
    served = [row for row in compared if row.version is not None]
    fresh = [row for row in served if row.version == newest]
    stale = [row for row in served if row.version != newest]
    drift, older = (_mean_per_token(rows, lambda row: row.divergence) for rows in (fresh, stale))
    tokens = sum(row.tokens for row in compared)
    total = fsum(row.ratios for row in compared)
    squares = fsum(row.squared_ratios for row in compared)
    return {
        "drift_kl": drift,
        "drift_logp_mean_abs": _mean_per_token(fresh, lambda row: row.distance),
        "staleness_kl": None if drift is None or older is None else older - drift,
        "effective_sample_size": total * total / (tokens * squares),
        "ratio_cut_share": sum(row.cut for row in compared) / tokens,
        "masked_share": sum(row.masked for row in compared) / len(compared),
    }


def drifted_episodes(
    compared: Sequence[RowComparison], newest: int | None, bound: float
) -> dict[UUID, str]:
    """Return a message for each episode with a row of version `newest` that drifts past `bound`.

    If the drift over all rows is past the bound, there is at least one.
    """
    drift_by_episode: dict[UUID, float] = {}
    for row in compared:
        drift = row.divergence / row.tokens
        if row.version == newest is not None and row.key is not None and not drift <= bound:
            episode, _ = row.key
            drift_by_episode[episode] = max(drift, drift_by_episode.get(episode, 0.0))
    return {
        episode: f"server and trainer differ by {drift:.3g} nats a token"
        for episode, drift in drift_by_episode.items()
    }


def _mean_per_token(
    rows: Sequence[RowComparison], figure: Callable[[RowComparison], float]
) -> float | None:
    return fsum(map(figure, rows)) / sum(row.tokens for row in rows) if rows else None
