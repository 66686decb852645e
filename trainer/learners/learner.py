"""One policy's learner: loads a version, takes an update's rows, saves what came out."""

import logging
import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from trainer.batching import plan_micro_batches, split_steps
from trainer.errors import Interrupted, LearnerError
from trainer.learners.grpo import make_trainer
from trainer.learners.logprobs import sampled_logprobs
from trainer.learners.model import attach_adapter, load_base
from trainer.recipe import Recipe
from trainer.rows import Row
from trainer.trees import build_tree

STATE_FILE = "optimizer.pt"
IN_BETWEEN = "trained on, and not saved as a version"


class Learner:
    """Holds the model between updates; `restore` puts it where a version left it."""

    def __init__(self, model: str, recipe: Recipe, seed: int, scratch: Path) -> None:
        """Load the base model (seconds to minutes).

        Raises:
            LearnerError: see `load_base`.
        """
        # TRL and transformers speak through logging and warnings; ours is the one log.
        logging.getLogger("trl").setLevel(logging.ERROR)
        self._recipe = recipe
        self._seed = seed
        self._scratch = scratch
        base, self._tokenizer = load_base(model, recipe)
        # Where the model stands: a version's folder, None for the base, or in between.
        self._stands_at: Path | str | None = None
        self._interrupted = threading.Event()
        self._start(base, None)

    def interrupt(self) -> None:
        """Make a running `update` raise `Interrupted` at its next micro-batch."""
        self._interrupted.set()

    def _start(self, base: Any, adapter: Path | None) -> None:
        self._model = attach_adapter(base, self._recipe, adapter, self._seed)
        self._trainer = make_trainer(self._model, self._tokenizer, self._recipe, self._scratch)

    def restore(self, adapter: Path | None) -> None:
        """Continue from `adapter` (None: from the base model), optimiser state included."""
        if adapter == self._stands_at:
            return
        self._start(self._model.unload(), adapter)
        state = None if adapter is None else adapter / "trainer" / STATE_FILE
        if state is not None and state.exists():
            self._trainer.optimizer.load_state_dict(torch.load(state, weights_only=True))
        self._stands_at = adapter

    def update(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Train on `rows`, whose weights sum to one; returns the update's metrics.

        Raises:
            LearnerError: the gradient is not finite; the learner must be restored.
            Interrupted: see `interrupt`.
        """
        self._stands_at = IN_BETWEEN
        started = time.perf_counter()
        steps = split_steps(rows, self._recipe.grpo.steps)
        plans = [plan_micro_batches(step, self._recipe.grpo.micro_batch_tokens) for step in steps]
        losses, norms = [], []
        for step, plan in zip(steps, plans, strict=True):
            share = sum(row.weight for row in step)
            loss = 0.0
            self._model.train()
            for micro_batch in plan:
                if self._interrupted.is_set():
                    raise Interrupted("the update was stopped half-way and will be done again")
                part = self._trainer.loss_of(micro_batch) / share
                self._trainer.accelerator.backward(part)
                loss += float(part.detach())
            norms.append(self._optimizer_step())
            losses.append(loss)
        return {
            "loss": sum(losses) / len(losses),
            "grad_norm": sum(norms) / len(norms),
            "optimizer_steps": len(steps),
            "rows": len(rows),
            "sampled_tokens": sum(len(row.sampled_ids) for row in rows),
            "row_tokens": sum(len(row.ids) for row in rows),
            "computed_tokens": sum(
                len(build_tree([row.ids for row in batch]).tokens)
                for plan in plans
                for batch in plan
            ),
            "train_seconds": time.perf_counter() - started,
            **self._take_metrics(),
        }

    def _optimizer_step(self) -> float:
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self._recipe.grpo.max_grad_norm))
        if not math.isfinite(norm):
            self._trainer.optimizer.zero_grad()
            raise LearnerError(f"the gradient's norm is {norm}: the update was not applied")
        self._trainer.optimizer.step()
        self._trainer.optimizer.zero_grad()
        return norm

    def _take_metrics(self) -> dict[str, float]:
        """TRL's own: entropy of the policy, share of tokens whose ratio was cut."""
        kept = self._trainer._metrics["train"]
        names = {"entropy": "entropy", "cispo_clip_ratio": "ratio_cut_share"}
        means = {ours: _mean(kept[theirs]) for theirs, ours in names.items() if kept[theirs]}
        kept.clear()
        return means

    def logprobs(self, rows: Sequence[Row]) -> list[list[float]]:
        """Log-probabilities (S,) of each row's sampled tokens under the present policy, T = 1."""
        self._model.eval()
        with torch.no_grad():
            return [
                sampled_logprobs(self._model, [_at_temperature_one(row)])[0].tolist()
                for row in rows
            ]

    def save(self, folder: Path) -> None:
        """Write the adapter for the server and, in `trainer/`, what resuming needs."""
        self._model.save_pretrained(str(folder), safe_serialization=True)
        (folder / "README.md").unlink(missing_ok=True)
        state = folder / "trainer" / STATE_FILE
        state.parent.mkdir(exist_ok=True)
        torch.save(self._trainer.optimizer.state_dict(), state)

    def saved_as(self, adapter: Path) -> None:
        """What was trained last is now `adapter`: continuing from it needs no reading back."""
        self._stands_at = adapter


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _at_temperature_one(row: Row) -> Row:
    return msgspec.structs.replace(row, temperature=1.0)
