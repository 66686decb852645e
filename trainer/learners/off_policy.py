"""How far the policy in training is from those that sampled its rows, and what follows.

With d = log policy − log sampled, per token. A sequence whose geometric mean ratio
exp(mean d) is out of bounds carries no loss (the others' weights stay as they are, so that
an update with such rows is a smaller one); the ratios of the rest are truncated by the loss.

The divergence KL(sampled ‖ policy) is estimated by mean(exp(d) − 1 − d), never negative and
of little variance (Schulman, http://joschu.net/blog/kl-approx.html, k3). Before the first
optimiser step the policy in training *is* the newest version: rows that it sampled differ by
arithmetic alone, which is drift; older ones by drift and by staleness.
"""

from collections.abc import Sequence
from math import fsum
from typing import Any

import torch
from torch import Tensor

from store.records import Record


class Compared(Record, frozen=True, kw_only=True):
    """Sums over the sampled tokens of one row; `divergence` of exp(d) − 1 − d."""

    version: int
    tokens: int
    divergence: float
    distance: float
    ratios: float
    squared_ratios: float
    cut: int
    masked: bool


def keeps_loss(log_ratios: Tensor, mask: Tensor, least: float, most: float) -> Tensor:
    """Which sequences carry loss: 1 or 0, (B, 1), for d and its mask (B, T)."""
    means = (log_ratios * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    ratios = means.exp()
    return ((ratios >= least) & (ratios <= most)).to(mask.dtype)


def compare(
    log_ratios: Tensor, mask: Tensor, keeps: Tensor, versions: Sequence[int], cap: float
) -> list[Compared]:
    """One record a row, for d and its mask (B, T)."""
    d = torch.where(mask.bool(), log_ratios.detach().double(), 0.0)
    ratios = d.exp() * mask
    columns = (
        mask.sum(1).long(),
        (d.exp() - 1 - d).sum(1),
        d.abs().sum(1),
        ratios.sum(1),
        (ratios**2).sum(1),
        (ratios > cap).sum(1),
        keeps[:, 0] == 0,
    )
    return [
        Compared(
            version=version,
            tokens=tokens,
            divergence=divergence,
            distance=distance,
            ratios=ratio,
            squared_ratios=squared,
            cut=cut,
            masked=masked,
        )
        for version, tokens, divergence, distance, ratio, squared, cut, masked in zip(
            versions, *(column.tolist() for column in columns), strict=True
        )
    ]


def off_policy_metrics(compared: Sequence[Compared], newest: int | None) -> dict[str, Any]:
    """An update's figures, JSON-ready; None where no row can tell.

    `drift_kl` and `drift_logp_mean_abs` of the rows that version `newest` sampled
    (None: the policy is no version);
    `staleness_kl` is what the divergence of older rows exceeds the drift by;
    `effective_sample_size` (Σw)² / (n·Σw²) over all tokens' ratios w, before any is cut.
    """
    fresh = [row for row in compared if row.version == newest]
    stale = [row for row in compared if row.version != newest]
    drift, older = _divergence(fresh), _divergence(stale)
    tokens = sum(row.tokens for row in compared)
    total, squares = (
        fsum(row.ratios for row in compared),
        fsum(row.squared_ratios for row in compared),
    )
    return {
        "drift_kl": drift,
        "drift_logp_mean_abs": _share([row.distance for row in fresh], fresh),
        "staleness_kl": None if drift is None or older is None else older - drift,
        "effective_sample_size": total * total / (tokens * squares),
        "ratio_cut_share": sum(row.cut for row in compared) / tokens,
        "masked_share": sum(row.masked for row in compared) / len(compared),
    }


def _divergence(rows: Sequence[Compared]) -> float | None:
    return _share([row.divergence for row in rows], rows)


def _share(sums: Sequence[float], rows: Sequence[Compared]) -> float | None:
    return fsum(sums) / sum(row.tokens for row in rows) if rows else None
