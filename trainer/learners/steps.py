"""Take optimiser steps: forward and backward passes over micro-batches, then a clipped step.

If a step's loss or gradient is not finite, each row is computed by itself: the rows with a loss or
gradient that is not finite are to blame. If no row has finite log-probabilities, the model or the
machine is to blame, and no episode is spent.
"""

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, Final, NamedTuple, TypeVar
from uuid import UUID

import numpy as np
import torch

from trainer.batches import Row, computed_tokens, divide_among_processes
from trainer.errors import Interrupted, OtherVocabulary, Unusable
from trainer.learners.budget import (
    MemoryRanOut,
    MicroBatches,
    catch_out_of_memory,
    report_short_memory,
)
from trainer.learners.losses.stored import InitialValues
from trainer.learners.off_policy import can_be_summed
from trainer.learners.processes import Processes

Result = TypeVar("Result")
# The norm that gradients are clipped to, separately for policy and critic.
MAX_GRAD_NORM: Final = 1.0
# A row with a larger return makes the baseline of its group too large for float32.
LARGEST_RETURN: Final = 1e30
NOT_FINITE: Final = "its loss or gradient is not finite"


class TrainedStep(NamedTuple):
    """The loss, gradient norm and micro-batches of one optimiser step."""

    loss: float
    norm: float
    micro_batches: MicroBatches


def update_figures(
    rows: Sequence[Row], trained: Sequence[TrainedStep], trainer: Any
) -> dict[str, Any]:
    """Return an update's metrics: its sizes, and the mean loss and gradient norm of its steps."""
    first_epoch = trained[: len(trained) // trainer.epochs]
    return {
        "loss": fmean(step.loss for step in trained),
        "grad_norm": fmean(step.norm for step in trained),
        "optimizer_steps": len(trained),
        "learning_rate": trainer.optimizer.param_groups[0]["lr"],
        "rows": len(rows),
        "recomputed_rows": sum(row.recomputed for row in rows),
        "sampled_tokens": sum(len(row.sampled_ids) for row in rows),
        "row_tokens": sum(row.size for row in rows),
        "computed_tokens": sum(
            computed_tokens(micro_batch, layout=trainer.layout)
            for step in first_epoch
            for micro_batch in step.micro_batches
        ),
    }


class OptimiserSteps:
    """Take optimiser steps with one TRL trainer, in all processes together."""

    def __init__(self, trainer: Any, interrupted: threading.Event, processes: Processes) -> None:
        """Store the optimiser's current learning rates; in an update `share` multiplies them."""
        self._processes = processes
        self._trainer = trainer
        self._interrupted = interrupted
        self._rates = [group["lr"] for group in trainer.optimizer.param_groups]
        # The share of the stored learning rates that the current update uses.
        self.share = 1.0

    def survey(
        self, micro_batches: Sequence[Sequence[Row]], compute: Callable[[Sequence[Row]], Result]
    ) -> list[Result]:
        """Apply `compute` to the micro-batches, divided among processes; return all results.

        Every process gets the results of all, in any order.

        Raises:
            MemoryRanOut: memory ran out.
            Interrupted: the update was stopped; the learner must be restored.
        """
        results = []
        for rows in self._own_share(micro_batches):
            with catch_out_of_memory(rows, self._processes):
                results.append(compute(rows))
        return [result for share in self._processes.gather(results) for result in share]

    def _own_share(self, micro_batches: Sequence[Sequence[Row]]) -> Iterator[Sequence[Row]]:
        shares = divide_among_processes(
            micro_batches, self._processes.count, layout=self._trainer.layout
        )
        for rows in shares[self._processes.rank]:
            self.stop_if_asked()
            yield rows

    def take(
        self, micro_batches: Sequence[Sequence[Row]], check_drift: Callable[[], None]
    ) -> tuple[float, float]:
        """Take one step on `micro_batches`, divided among processes; return loss and norm.

        The norm is that of the policy's gradient before clipping. `check_drift` is called after
        the backward passes, before the weights change; its errors pass through.

        Raises:
            Unusable: the loss or the gradient is not finite; the weights are unchanged.
            ShortOfMemory: memory ran out while the weights changed; the learner must be restored.
            MemoryRanOut: memory ran out earlier; the weights are unchanged.
            Interrupted: the update was stopped; the learner must be restored.
        """
        share = sum(row.weight for rows in micro_batches for row in rows)
        loss = 0.0
        for rows in self._own_share(micro_batches):
            with catch_out_of_memory(rows, self._processes):
                part = self._trainer.loss_of(rows) / share
                self._trainer.accelerator.backward(part)
                loss += float(part.detach())
        check_drift()
        total = sum(self._processes.gather(loss))
        if not math.isfinite(total):
            raise Unusable(f"the loss is {total}: the update was not applied")
        return total, self._apply_gradients()

    def stop_if_asked(self) -> None:
        """Raise `Interrupted` in all processes at once if any of them was asked to stop."""
        if any(self._processes.gather(self._interrupted.is_set())):
            raise Interrupted("the update was stopped half-way and will be done again")

    @report_short_memory("in the optimiser's step, which was undone")
    def _apply_gradients(self) -> float:
        policy, critic = self._trainer.trained_parameters()
        self._processes.sum_gradients([*policy, *critic])
        # Clipped separately: a critic with much to learn must not shrink the policy's step.
        norms = [
            float(torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM))
            for parameters in (policy, critic)
        ]
        if not all(map(math.isfinite, norms)):
            self._trainer.optimizer.zero_grad()
            figures = " and ".join(map(str, norms))
            raise Unusable(f"the gradients' norms are {figures}: the update was not applied")
        for group, rate in zip(self._trainer.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * self.share
        try:
            # If memory runs out here, only some parameters have moved: the step must not be tried
            # again from this state.
            self._trainer.optimizer.step()
        finally:
            self._trainer.optimizer.zero_grad()
        return norms[0]


def check_ids(rows: Sequence[Row], vocabulary: int) -> None:
    """Check that the model has an embedding for every token id in `rows`.

    Raises:
        OtherVocabulary: it lacks some; on a GPU such ids would crash the process.
    """
    out_of_range = {
        row.episode_id: f"token id out of range (vocabulary size {vocabulary})"
        for row in rows
        if not 0 <= np.min(row.ids) <= np.max(row.ids) < vocabulary
        or max(row.distribution.token_ids, default=0) >= vocabulary
    }
    if out_of_range:
        raise OtherVocabulary(
            "some rows have token ids of another vocabulary: did the model server have another base"
            " model when they were sampled?",
            out_of_range,
        )


def check_initial_values(rows: Sequence[Row], initial: InitialValues) -> None:
    """Check that all initial values are finite; averaging would spread NaN to all rows.

    Raises:
        Unusable: some are not; their episodes are to blame, unless all rows have such values.
    """
    not_finite = [
        row
        for row in rows
        if any(not all(map(math.isfinite, values.get(row.key, ()))) for values in initial)
    ]
    if not_finite:
        all_rows = len(not_finite) == len(rows)
        blamed = {} if all_rows else {row.episode_id: NOT_FINITE for row in not_finite}
        raise Unusable("log-probabilities or critic values of some rows are not finite", blamed)


def episodes_to_blame(
    trainer: Any, rows: Sequence[Row], stop_if_asked: Callable[[], None]
) -> Mapping[UUID, str]:
    """Return the episodes with a row whose loss or gradient is not finite, each with the reason.

    If some of these rows have extreme returns, only they count: such a return spoils its group. The
    result is empty if no row has finite log-probabilities. Every process computes every row, so
    that all get the same result. Gradients are left empty. `stop_if_asked` is called before each
    row; its errors pass through.
    """
    not_finite = []
    for row in rows:
        stop_if_asked()
        if not _is_finite(trainer, row):
            not_finite.append(row)
    with torch.no_grad():
        if not any(bool(torch.isfinite(trainer.score([row]).logprobs).all()) for row in rows):
            return {}
    extreme = [row for row in not_finite if abs(row.r_total) > LARGEST_RETURN]
    return {row.episode_id: NOT_FINITE for row in extreme or not_finite}


def _is_finite(trainer: Any, row: Row) -> bool:
    loss = trainer.loss_of([row])
    compared = trainer.take_comparisons()
    if not math.isfinite(float(loss.detach())) or not can_be_summed(compared):
        return False
    trainer.accelerator.backward(loss)
    policy, critic = trainer.trained_parameters()
    grads = [parameter.grad for parameter in (*policy, *critic) if parameter.grad is not None]
    finite = all(bool(torch.isfinite(grad).all()) for grad in grads)
    trainer.optimizer.zero_grad()
    return finite


def fits_in_memory(trainer: Any, processes: Processes, row: Row) -> bool:
    """Return whether one row by itself fits into memory in training; gradients are left empty."""
    try:
        with catch_out_of_memory([row], processes):
            trainer.accelerator.backward(trainer.loss_of([row]))
    except MemoryRanOut:
        return False
    finally:
        trainer.optimizer.zero_grad()
        trainer.take_comparisons()
    return True
