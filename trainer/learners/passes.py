"""Take one optimiser step: micro-batches forward and backward, then the clipped step."""

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, Final, NamedTuple, TypeVar

import torch

from trainer.batches import Row, computed_tokens, share_out
from trainer.errors import Interrupted, Unusable
from trainer.learners.budget import Budget, MicroBatches, NoRoom, needs_memory, says_no_room
from trainer.learners.distributed.processes import Processes

Seen = TypeVar("Seen")
# The norm that gradients are clipped to, policy and critic apart.
MAX_GRAD_NORM: Final = 1.0
# TRL's metric names and Pawl's: the policy's entropy, and the share of clipped ratios.
FIGURES = {"entropy": "entropy", "clip_ratio/region_mean": "clip_share"}


class TrainedStep(NamedTuple):
    """Hold what one optimiser step came to: its loss, its gradient's norm, its micro-batches."""

    loss: float
    norm: float
    micro_batches: MicroBatches


def mean_figures(kept: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the means of those of TRL's metrics that are shown, under their names here."""
    named = ((ours, kept.get(theirs)) for theirs, ours in FIGURES.items())
    return {ours: fmean(values) for ours, values in named if values}


def update_figures(
    rows: Sequence[Row], trained: Sequence[TrainedStep], trainer: Any, *, merge: bool
) -> dict[str, Any]:
    """Return the sizes of an update of `rows`, and the means over its steps."""
    first_epoch = trained[: len(trained) // trainer.epochs]
    return {
        "loss": fmean(step.loss for step in trained),
        "grad_norm": fmean(step.norm for step in trained),
        "optimizer_steps": len(trained),
        "learning_rate": trainer.optimizer.param_groups[0]["lr"],
        "rows": len(rows),
        "recomputed_rows": sum(row.recomputed for row in rows),
        "sampled_tokens": sum(len(row.sampled_ids) for row in rows),
        "row_tokens": sum(len(row.ids) for row in rows),
        "computed_tokens": sum(
            computed_tokens(micro_batch, merge=merge)
            for step in first_epoch
            for micro_batch in step.micro_batches
        ),
    }


class Step:
    """Take optimiser steps with one TRL trainer."""

    def __init__(
        self,
        trainer: Any,
        interrupted: threading.Event,
        processes: Processes,
    ) -> None:
        """Store what a step needs; the optimiser's present learning rates are the full ones."""
        self._processes = processes
        self._trainer = trainer
        self._interrupted = interrupted
        self._rates = [group["lr"] for group in trainer.optimizer.param_groups]
        # What this update's learning rates are of the full ones.
        self.share = 1.0

    def survey(
        self, micro_batches: Sequence[Sequence[Row]], view: Callable[[Sequence[Row]], Seen]
    ) -> list[Seen]:
        """Apply `view` to all micro-batches, each process to its own, and return all results.

        Raises:
            NoRoom: memory ran out.
            Interrupted: the update was stopped; the learner must be restored.
        """
        results = []
        for rows in self._share(micro_batches):
            with needs_memory(rows):
                results.append(view(rows))
        return [one for share in self._processes.gather(results) for one in share]

    def _share(self, micro_batches: Sequence[Sequence[Row]]) -> Iterator[Sequence[Row]]:
        for rows in share_out(micro_batches, self._processes.count)[self._processes.rank]:
            self.stop_if_asked()
            yield rows

    def take(
        self,
        micro_batches: Sequence[Sequence[Row]],
        check_drift: Callable[[], None],
    ) -> tuple[float, float]:
        """Take one step on all of `micro_batches`, each process on its own; return loss and norm.

        The norm is that of the policy's gradient before clipping. `check_drift` is called before
        anything is applied; what it raises passes on.

        Raises:
            Unusable: the loss or the gradient is not finite, and nothing was applied.
            ShortOfMemory: memory ran out while the step was applied; the learner must be restored.
            NoRoom: memory ran out before; nothing was applied.
            Interrupted: the update was stopped; the learner must be restored.
        """
        share = sum(row.weight for rows in micro_batches for row in rows)
        loss = 0.0
        self._trainer.model.train()
        for rows in self._share(micro_batches):
            with needs_memory(rows):
                own = self._trainer.loss_of(rows) / share
                self._trainer.accelerator.backward(own)
                loss += float(own.detach())
        check_drift()
        whole = sum(self._processes.gather(loss))
        if not math.isfinite(whole):
            raise Unusable(f"the loss is {whole}: the update was not applied")
        return whole, self._apply()

    def stop_if_asked(self) -> None:
        """Stop all processes at the same micro-batch if one was asked to stop.

        Raises:
            Interrupted: they stop.
        """
        if any(self._processes.gather(self._interrupted.is_set())):
            raise Interrupted("the update was stopped half-way and will be done again")

    @says_no_room("in the optimiser's step, which was undone")
    def _apply(self) -> float:
        policy, critic = self._trainer.trained_parameters()
        self._processes.add_up([*policy, *critic])
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
        self._apply_gradients()
        return norms[0]

    def _apply_gradients(self) -> None:
        try:
            # Where memory runs out some parameters may have moved and others not: this must not be
            # tried again from here.
            self._trainer.optimizer.step()
        finally:
            self._trainer.optimizer.zero_grad()


def survey_in_parts(
    budget: Budget,
    step: Step,
    undo: Callable[[], None],
    rows: Sequence[Row],
    view: Callable[[Sequence[Row]], Seen],
) -> list[Seen]:
    """Apply `view` to micro-batches of `rows` that fit into memory, without training on them.

    `undo` is called where memory ran out, before it is tried again with smaller ones.
    """

    def run(cut: MicroBatches) -> list[Seen]:
        return step.survey(cut, view)

    def can_be_seen(row: Row) -> bool:
        try:
            run([[row]])
        except NoRoom:
            return False
        return True

    seen, _ = budget.fit(rows, run, undo, can_be_seen, trains=False)
    return seen
