"""One optimiser step: micro-batches forward and backward, then the clipped step."""

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trainer.batching import share_out
from trainer.errors import Interrupted, LearnerError
from trainer.learners.processes import Processes
from trainer.recipe_parts import OptimizerPart
from trainer.rows import Row
from trainer.schedule import rate_share


class Step:
    """Takes optimiser steps with one TRL trainer; `taken` counts them from the base on."""

    def __init__(
        self,
        trainer: Any,
        rule: OptimizerPart,
        interrupted: threading.Event,
        processes: Processes,
    ) -> None:
        self._processes = processes
        self._trainer = trainer
        self._rule = rule
        self._interrupted = interrupted
        self._rates = [group["lr"] for group in trainer.optimizer.param_groups]
        self.taken = 0

    def take(
        self,
        micro_batches: Sequence[Sequence[Row]],
        judge: Callable[[], None],
    ) -> tuple[float, float]:
        """One step on all of `micro_batches`, each process on its own; loss and gradient norm.

        `judge` is called before anything is applied; what it raises passes on.

        Raises:
            LearnerError: the gradient is not finite; nothing was applied.
            Interrupted: it was asked to stop; the learner must be restored.
        """
        share = sum(row.weight for rows in micro_batches for row in rows)
        loss = 0.0
        self._trainer.model.train()
        for rows in share_out(micro_batches, self._processes.count)[self._processes.rank]:
            self._stop_if_asked()
            part = self._trainer.loss_of(rows) / share
            self._trainer.accelerator.backward(part)
            loss += float(part.detach())
        judge()
        return sum(self._processes.gather(loss)), self._apply()

    def _stop_if_asked(self) -> None:
        """All processes stop at the same micro-batch, or none."""
        if any(self._processes.gather(self._interrupted.is_set())):
            raise Interrupted("the update was stopped half-way and will be done again")

    def _apply(self) -> float:
        parameters = [p for p in self._trainer.model.parameters() if p.requires_grad]
        self._processes.add_up(parameters)
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self._rule.max_grad_norm))
        if not math.isfinite(norm):
            self._trainer.optimizer.zero_grad()
            raise LearnerError(f"the gradient's norm is {norm}: the update was not applied")
        share = rate_share(self._rule, self.taken)
        for group, rate in zip(self._trainer.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * share
        self._trainer.optimizer.step()
        self._trainer.optimizer.zero_grad()
        self.taken += 1
        return norm
