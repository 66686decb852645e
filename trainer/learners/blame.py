"""Find the rows that are to blame where a step's loss or gradient is not finite.

Looked for only then: each row is computed by itself. A row is to blame if that is not finite,
either, unless no row can be computed at all: then it is the model's doing, or the machine's,
and no episode must pay for it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from uuid import UUID

import torch

from trainer.batches import Row
from trainer.errors import OtherVocabulary, Unusable
from trainer.learners.budget import NoRoom, needs_memory
from trainer.learners.losses.stored import View
from trainer.learners.off_policy import can_be_summed

# A return past it makes what its whole group is compared with too large for float32.
LARGEST_RETURN: Final = 1e30
NOT_FINITE: Final = "its loss or gradient is not finite"


def check_ids(rows: Sequence[Row], vocabulary: int) -> None:
    """Refuse rows with ids that the model has no embedding for.

    Raises:
        OtherVocabulary: there are some; on a GPU they would end the process.
    """
    strange = {
        row.episode_id: f"it has a token id that is none of the model's {vocabulary}"
        for row in rows
        if min(row.ids) < 0
        or max(row.ids) >= vocabulary
        or max(row.distribution.token_ids, default=0) >= vocabulary
    }
    if strange:
        raise OtherVocabulary(
            "some rows have ids of another vocabulary: was another base model served then?", strange
        )


def check_view(rows: Sequence[Row], view: View) -> None:
    """Refuse rows whose figures before the first step are not finite: means would spread them.

    Raises:
        Unusable: there are some.
    """
    odd = [
        row
        for row in rows
        if any(not all(map(math.isfinite, values.get(row.key, ()))) for values in view)
    ]
    if odd:
        blamed = {} if len(odd) == len(rows) else {row.episode_id: NOT_FINITE for row in odd}
        raise Unusable("log-probabilities or values of some rows are not finite", blamed)


def to_blame(
    trainer: Any, rows: Sequence[Row], stop_if_asked: Callable[[], None]
) -> Mapping[UUID, str]:
    """Return why, by episode, for those that make the gradient of `rows` infinite.

    Every process computes every row, so that all come to the same. Gradients are left empty.
    `stop_if_asked` is called before each row; what it raises passes on.
    """
    odd = []
    for row in rows:
        stop_if_asked()
        if not _is_finite(trainer, row):
            odd.append(row)
    if not any(_is_computed(trainer, row) for row in rows):
        return {}
    extreme = [row for row in odd if abs(row.r_total) > LARGEST_RETURN]
    return {row.episode_id: NOT_FINITE for row in extreme or odd}


def _is_finite(trainer: Any, row: Row) -> bool:
    loss = trainer.loss_of([row])
    compared = trainer.take_compared()
    if not math.isfinite(float(loss.detach())) or not can_be_summed(compared):
        return False
    trainer.accelerator.backward(loss)
    policy, critic = trainer.trained_parameters()
    grads = [one.grad for one in (*policy, *critic) if one.grad is not None]
    finite = all(bool(torch.isfinite(grad).all()) for grad in grads)
    trainer.optimizer.zero_grad()
    return finite


def fits(trainer: Any, row: Row) -> bool:
    """Return whether there is memory to train on one row by itself; gradients are left empty."""
    try:
        with needs_memory([row]):
            trainer.accelerator.backward(trainer.loss_of([row]))
    except NoRoom:
        return False
    finally:
        trainer.optimizer.zero_grad()
        trainer.take_compared()
    return True


def _is_computed(trainer: Any, row: Row) -> bool:
    with torch.no_grad():
        return bool(torch.isfinite(trainer.score([row]).logprobs).all())
