"""Measure after an update how far the policy has gone from its base model.

How much a model forgets of what it was not trained on follows from its KL divergence to the base
model on what it was (arXiv:2509.04259). Here that is KL(policy ‖ base), exact over the vocabulary
and at temperature one, on some of the calls that the update trained on. The base is the same
weights with the adapter off. Nothing that is trained changes, and nothing is drawn: which calls
are measured follows from their tokens.
"""

import math
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

import torch
from torch import Tensor

from trainer.batches import Row, RowKey
from trainer.errors import Unusable
from trainer.learners.kernels.divergence import head_kl, logits_kl
from trainer.learners.losses.kl import ByRow, by_row
from trainer.learners.scoring import tree_states, whole_logits

# The share of an update's tokens that are measured, within bounds: they are computed twice, and
# without a gradient, where training computes each at least three times.
PART: Final = 16
FEWEST_TOKENS: Final = 512
MOST_TOKENS: Final = 16384


def metered_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows to measure: one at least, and as many as the bound on tokens allows.

    They are the first by the hash of their ids, so the same rows give the same choice in any order.
    """
    tokens = sum(len(row.ids) for row in rows)
    left = min(MOST_TOKENS, max(FEWEST_TOKENS, tokens // PART))
    chosen: list[Row] = []
    for row in sorted(rows, key=_draw):
        if chosen and len(row.ids) > left:
            break
        chosen.append(row)
        left -= len(row.ids)
    return chosen


def _draw(row: Row) -> bytes:
    return blake2b(str(row.ids).encode(), digest_size=8).digest()


@torch.no_grad()
def kl_by_row(model: Any, rows: Sequence[Row], *, merge: bool) -> ByRow:
    """Return KL(policy ‖ base) before each sampled token, (S,) in nats, by row.

    `model` is a PEFT model in evaluation mode; `merge` says that it was prepared for trees.
    """
    if merge:
        return by_row(rows, _merged(model, rows))
    return by_row(rows, torch.cat([_separate(model, row) for row in rows]))


def _merged(model: Any, rows: Sequence[Row]) -> Tensor:
    own, parents = tree_states(model, rows)
    with model.disable_adapter():
        base, _ = tree_states(model, rows)
    places = torch.tensor(parents, device=own.device)
    return head_kl(own[places], base[places], model.get_output_embeddings().weight)


def _separate(model: Any, row: Row) -> Tensor:
    own = whole_logits(model, [row])[0]
    with model.disable_adapter():
        base = whole_logits(model, [row])[0]
    return logits_kl(own, base)


def kl_figures(
    rows: Sequence[Row], measured: Sequence[Mapping[RowKey, Sequence[float]]]
) -> dict[str, Any]:
    """Return `kl_to_base`, the mean over all sampled tokens of `rows` in nats, and their number.

    Raises:
        Unusable: it is not finite, so neither is the policy.
    """
    values = {key: own for part in measured for key, own in part.items()}
    each = [one for row in rows for one in values[row.key]]
    mean = math.fsum(each) / len(each)
    if not math.isfinite(mean):
        raise Unusable(f"the KL of the trained policy to its base model is {mean}: it is not kept")
    return {"kl_to_base": mean, "kl_tokens": len(each)}
