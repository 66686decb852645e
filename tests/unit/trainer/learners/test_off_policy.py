"""Off-policy figures against plain arithmetic, token by token."""

import math
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.training import rows as training_rows
from trainer.batches import Row
from trainer.learners.off_policy import (
    RowComparison,
    compare_rows,
    loss_mask,
    mean_drift,
    off_policy_metrics,
)
from trainer.recipes.recipe import OffPolicyOptions

LOG_RATIOS = st.lists(
    st.lists(st.floats(-3, 3, allow_subnormal=False), min_size=1, max_size=6),
    min_size=1,
    max_size=6,
)


def padded(rows: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    """d and its mask (B, T); what is padding holds nonsense."""
    width = max(map(len, rows))
    values = [[*row, *[99.0] * (width - len(row))] for row in rows]
    mask = [[1.0] * len(row) + [0.0] * (width - len(row)) for row in rows]
    return torch.tensor(values, dtype=torch.float64), torch.tensor(mask, dtype=torch.float64)


def compared(
    rows: list[list[float]], versions: list[int | None], cap: float = 2.0
) -> list[RowComparison]:
    d, mask = padded(rows)
    return compare_rows(d, mask, loss_mask(d, mask, 0.5, 2.0), versions, cap)


@given(LOG_RATIOS)
def test_a_sequence_is_masked_by_its_geometric_mean_ratio(rows: list[list[float]]) -> None:
    d, mask = padded(rows)
    kept = loss_mask(d, mask, 0.5, 2.0)[:, 0].tolist()
    for row, keep in zip(rows, kept, strict=True):
        ratio = math.exp(math.fsum(row) / len(row))
        if not (math.isclose(ratio, 0.5) or math.isclose(ratio, 2.0)):
            assert keep == (0.5 < ratio < 2.0)


@pytest.mark.parametrize(
    ("tokens", "largest"), [(1, 2.0**20**0.5), (20, 2.0), (80, 2.0**0.5), (2000, 2.0**0.1)]
)
def test_bounds_are_narrower_for_longer_sequences(tokens: int, largest: float) -> None:
    mask = torch.ones(1, tokens, dtype=torch.float64)
    least, most = OffPolicyOptions(sequence_min=0.5, sequence_max=2.0).sequence_bounds(tokens)
    assert most == pytest.approx(largest)
    assert least == pytest.approx(1 / largest)
    for mean, kept in ((math.log(largest) - 1e-6, 1.0), (math.log(largest) + 1e-6, 0.0)):
        for sign in (1, -1):
            assert float(loss_mask(sign * mean * mask, mask, least, most)) == kept


def kept_within(least: float, most: float, d: torch.Tensor, mask: torch.Tensor) -> list[float]:
    rule = OffPolicyOptions(sequence_min=least, sequence_max=most)
    bounds = [rule.sequence_bounds(int(tokens)) for tokens in mask.sum(1)]
    kept = loss_mask(d, mask, *torch.tensor(bounds, dtype=torch.float64).split(1, dim=1))
    values: list[float] = kept[:, 0].tolist()
    return values


def drifting(versions: list[int], tokens: int, difference: float) -> tuple[list[Row], list[Any]]:
    """Rows of these versions, and what the policy says of them: all differ by the same."""
    made = [
        msgspec.structs.replace(
            training_rows()[0],
            version=version,
            sampled_ids=(5,) * tokens,
            sampled_logprobs=(-1.0,) * tokens,
        )
        for version in versions
    ]
    return made, [[-1.0 + difference] * tokens for _ in made]


@pytest.mark.parametrize("tokens", [20, 961, 4000, 30_000])
def test_long_reply_is_not_masked_for_a_drift_that_is_permitted(tokens: int) -> None:
    bound = OffPolicyOptions().max_drift
    made, policy = drifting([3], tokens, -0.9 * bound)
    drift = mean_drift(made, policy, 3, bound)
    assert drift == pytest.approx(-0.9 * bound)
    d, mask = padded([[-0.9 * bound] * tokens])
    least, most = OffPolicyOptions().sequence_bounds(tokens)
    assert float(loss_mask(d, mask, least, most, drift)) == 1.0
    # What the drift does not explain is another policy still.
    apart = math.log(most) + 1e-6
    assert float(loss_mask(d + apart * mask, mask, least, most, drift)) == 0.0
    assert float(loss_mask(d - apart * mask, mask, least, most, drift)) == 0.0


@pytest.mark.parametrize(
    ("versions", "difference", "drift"),
    [([3, 2], -0.05, -0.05), ([2], -0.05, 0.0), ([3], 0.05, 0.0), ([3], -5.0, -0.1)],
    ids=["newest", "older alone", "above zero", "past the bound"],
)
def test_mean_drift_is_of_the_newest_version_and_bounded(
    versions: list[int], difference: float, drift: float
) -> None:
    made, policy = drifting(versions, 7, difference)
    assert mean_drift(made, policy, 3, 0.1) == pytest.approx(drift)


def test_each_sequence_is_masked_by_the_bounds_of_its_length() -> None:
    d, mask = padded([[1.0], [1.0] * 40, [0.1] * 40])
    kept = kept_within(0.5, 2.0, d, mask)
    assert kept == [1.0, 0.0, 1.0]


def test_sequence_of_any_length_is_kept_without_bounds() -> None:
    d, mask = padded([[-30.0], [9.0] * 20])
    kept = kept_within(0.0, 1e300, d, mask)
    assert kept == [1.0, 1.0]


@given(LOG_RATIOS)
def test_off_policy_sums_of_a_row_equal_the_sums_over_its_tokens(rows: list[list[float]]) -> None:
    for row, found in zip(rows, compared(rows, [0] * len(rows)), strict=True):
        assert found.tokens == len(row)
        assert found.divergence == pytest.approx(sum(math.exp(d) - 1 - d for d in row))
        assert found.distance == pytest.approx(sum(map(abs, row)))
        assert found.ratios == pytest.approx(sum(map(math.exp, row)))
        assert found.squared_ratios == pytest.approx(sum(math.exp(2 * d) for d in row))
        assert found.cut == sum(math.exp(d) > 2.0 for d in row)


@given(LOG_RATIOS, st.data())
def test_drift_is_of_the_newest_version_and_staleness_of_older_versions(
    rows: list[list[float]], data: st.DataObject
) -> None:
    versions = [data.draw(st.integers(3, 5)) for _ in rows]
    found = off_policy_metrics(compared(rows, versions), newest=5)
    fresh = [d for row, v in zip(rows, versions, strict=True) if v == 5 for d in row]
    stale = [d for row, v in zip(rows, versions, strict=True) if v != 5 for d in row]
    if fresh:
        drift = sum(math.exp(d) - 1 - d for d in fresh) / len(fresh)
        assert found["drift_kl"] == pytest.approx(drift)
        assert found["drift_logp_mean_abs"] == pytest.approx(sum(map(abs, fresh)) / len(fresh))
    else:
        assert found["drift_kl"] is None
        assert found["drift_logp_mean_abs"] is None
    if fresh and stale:
        older = sum(math.exp(d) - 1 - d for d in stale) / len(stale)
        assert found["staleness_kl"] == pytest.approx(older - drift)
    else:
        assert found["staleness_kl"] is None


@given(LOG_RATIOS)
def test_effective_sample_size_follows_kish_and_is_1_on_policy(rows: list[list[float]]) -> None:
    every = [math.exp(d) for row in rows for d in row]
    found = off_policy_metrics(compared(rows, [0] * len(rows)), newest=0)
    wanted = sum(every) ** 2 / (len(every) * sum(ratio**2 for ratio in every))
    assert found["effective_sample_size"] == pytest.approx(wanted)
    assert found["ratio_cut_share"] == pytest.approx(sum(r > 2 for r in every) / len(every))
    same = off_policy_metrics(compared([[0.0, 0.0]], [0]), newest=0)
    assert same["effective_sample_size"] == 1.0
    assert same["drift_kl"] == same["masked_share"] == 0.0


@given(LOG_RATIOS, st.data())
def test_recomputed_rows_count_in_all_figures_but_drift_and_staleness(
    rows: list[list[float]], data: st.DataObject
) -> None:
    versions = [data.draw(st.sampled_from([None, 4, 5])) for _ in rows]
    newest = data.draw(st.sampled_from([None, 5]))
    every, served = (
        off_policy_metrics(compared(one, which), newest=newest)
        for one, which in (
            (rows, versions),
            (
                [row for row, v in zip(rows, versions, strict=True) if v is not None] or rows,
                [v for v in versions if v is not None] or [None] * len(rows),
            ),
        )
    )
    for name in ("drift_kl", "drift_logp_mean_abs", "staleness_kl"):
        assert every[name] == (None if served[name] is None else pytest.approx(served[name]))
    whole = off_policy_metrics(compared(rows, [5 for _ in rows]), newest=5)
    for name in ("effective_sample_size", "ratio_cut_share", "masked_share"):
        assert every[name] == pytest.approx(whole[name])
