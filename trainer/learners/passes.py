"""Take one optimiser step: micro-batches forward and backward, then the clipped step."""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from trainer.batches.micro_batches import share_out
from trainer.batches.rows import Row
from trainer.errors import Interrupted, Unusable
from trainer.learners.distributed.processes import Processes
from trainer.recipes.schedule import rate_share
from trainer.recipes.training import OptimizerOptions

Seen = TypeVar("Seen")


class Step:
    """Take optimiser steps with one TRL trainer; `taken` counts them from the base model on."""

    def __init__(
        self,
        trainer: Any,
        rule: OptimizerOptions,
        interrupted: threading.Event,
        processes: Processes,
    ) -> None:
        """Store what a step needs; the optimiser's present learning rates are the full ones."""
        self._processes = processes
        self._trainer = trainer
        self._rule = rule
        self._interrupted = interrupted
        self._rates = [group["lr"] for group in trainer.optimizer.param_groups]
        self.taken = 0
        # What this update's learning rates are of those that the schedule gives.
        self.share = 1.0

    def survey(
        self, micro_batches: Sequence[Sequence[Row]], view: Callable[[Sequence[Row]], Seen]
    ) -> list[Seen]:
        """Apply `view` to all micro-batches, each process to its own, and return all results.

        Raises:
            Interrupted: the update was stopped; the learner must be restored.
        """
        found = [view(rows) for rows in self._share(micro_batches)]
        return [one for share in self._processes.gather(found) for one in share]

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
            Unusable: the loss or the gradient is not finite; nothing was applied.
            Interrupted: the update was stopped; the learner must be restored.
        """
        share = sum(row.weight for rows in micro_batches for row in rows)
        loss = 0.0
        self._trainer.model.train()
        for rows in self._share(micro_batches):
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

    def _apply(self) -> float:
        policy, critic = self._trainer.trained_parameters()
        self._processes.add_up([*policy, *critic])
        # Clipped separately: a critic with much to learn must not shrink the policy's step.
        norms = [
            float(torch.nn.utils.clip_grad_norm_(parameters, self._rule.max_grad_norm))
            for parameters in (policy, critic)
        ]
        if not all(map(math.isfinite, norms)):
            self._trainer.optimizer.zero_grad()
            told = " and ".join(map(str, norms))
            raise Unusable(f"the gradients' norms are {told}: the update was not applied")
        share = self.share * rate_share(self._rule, self.taken)
        for group, rate in zip(self._trainer.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * share
        self._trainer.optimizer.step()
        self._trainer.optimizer.zero_grad()
        self.taken += 1
        return norms[0]
