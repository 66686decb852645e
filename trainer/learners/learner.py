"""One policy's learner: loads a version, takes an update's rows, saves what came out."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import structlog
import torch
from accelerate import PartialState
from safetensors import SafetensorError

from trainer.batching import computed_tokens, split_steps
from trainer.errors import DriftOutOfBounds, Unusable
from trainer.learners.blame import can_be_summed, check_ids, check_view, to_blame
from trainer.learners.budget import Budget, Plan
from trainer.learners.determinism import be_deterministic
from trainer.learners.grpo import View, make_trainer
from trainer.learners.memory import give_freed_memory_back
from trainer.learners.merging import why_separate
from trainer.learners.model import attach_adapter, load_base
from trainer.learners.off_policy import off_policy_metrics
from trainer.learners.passes import Step
from trainer.learners.ppo import make_ppo_trainer
from trainer.learners.processes import Processes
from trainer.learners.scoring import score_rows
from trainer.learners.state import OPTIMIZER, load_state, save_state
from trainer.recipe import Recipe
from trainer.rows import Row

log = structlog.get_logger()

TRAINERS = {"grpo": make_trainer, "ppo": make_ppo_trainer}
# TRL's names and ours: entropy of the policy; tokens whose ratio was clipped.
FIGURES = {
    "entropy": "entropy",
    "clip_ratio/region_mean": "clip_share",
}
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
        be_deterministic()
        self._recipe = recipe
        self._seed = seed
        self._scratch = scratch
        base, self._tokenizer = load_base(model, recipe)
        # How many processes there are, `accelerate launch` has said; one if nobody did.
        PartialState(cpu=not torch.cuda.is_available())
        self.processes = Processes()
        self.processes.shard(base)
        # Where the model stands: a version's folder, None for the base, or in between.
        self._stands_at: Path | str | None = None
        self._interrupted = threading.Event()
        self._merge: bool | None = None
        self._start(base, None)

    def interrupt(self) -> None:
        """Make a running `update` raise `Interrupted` at its next micro-batch."""
        self._interrupted.set()

    def _start(self, base: Any, adapter: Path | None) -> None:
        self._model = attach_adapter(base, self._recipe, adapter, self._seed)
        if self._merge is None:
            self._merge = self._can_merge()
            tokens, alone = self._recipe.batch.micro_batch_tokens, self.processes.count == 1
            self._budget = Budget(tokens, merge=self._merge, alone=alone)
        make = TRAINERS[self._recipe.learner]
        self._trainer = make(
            self._model, self._tokenizer, self._recipe, self._scratch, merge=self._merge
        )
        self._step = Step(self._trainer, self._recipe.optimizer, self._interrupted, self.processes)

    def _can_merge(self) -> bool:
        if self._recipe.batch.merge_prefixes == "never":
            return False
        why = why_separate(self._model)
        if why is not None:
            log.warning("prefixes_not_merged", reason=why)
        return why is None

    def restore(self, adapter: Path | None) -> None:
        """Continue from `adapter` (None: from the base model), optimiser state included.

        Raises:
            AdapterError: see `load_state`.
        """
        if adapter == self._stands_at:
            return
        self._stands_at = IN_BETWEEN
        self._start(self._model.unload(), adapter)
        if adapter is not None:
            self._step.taken = load_state(self._parts(), adapter)
        self._stands_at = adapter

    def _parts(self) -> dict[str, Any]:
        """What is saved and resumed beside the adapter."""
        return {OPTIMIZER: self._trainer.optimizer} | self._trainer.parts()

    def update(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Train on `rows`, whose weights sum to one; returns the update's metrics.

        Raises:
            DriftOutOfBounds: the server sampled from another policy than the trainer has;
                as for any `LearnerError`, the learner must be restored.
            Unusable: some rows cannot be computed with, or loss or gradient is not finite.
            Interrupted: see `interrupt`.
        """
        check_ids(rows, self._model.get_input_embeddings().weight.shape[0])
        newest = self._version()
        self._stands_at = IN_BETWEEN
        started = time.perf_counter()
        view = self._look(rows)
        check_view(rows, view)
        rows = self._trainer.prepare(rows, view)
        off_policy: dict[str, Any] = {}

        def judge() -> None:
            # Before the first step the policy is the newest version: only then can drift be told.
            if not off_policy:
                off_policy.update(self._judge_drift(newest))

        steps = split_steps(rows, self._recipe.batch.steps) * self._trainer.epochs
        try:
            taken, plans = zip(*[self._take(step, judge) for step in steps], strict=True)
        except Unusable as error:
            self._forget()
            # Of all rows: who is to blame may have been compared with who is in this step.
            blamed = to_blame(self._trainer, rows, self._step.stop_if_asked)
            raise Unusable(str(error), blamed) from error
        give_freed_memory_back()
        return {
            "loss": _mean([loss for loss, _ in taken]),
            "grad_norm": _mean([norm for _, norm in taken]),
            "optimizer_steps": len(taken),
            "learning_rate": self._trainer.optimizer.param_groups[0]["lr"],
            "rows": len(rows),
            "sampled_tokens": sum(len(row.sampled_ids) for row in rows),
            "row_tokens": sum(len(row.ids) for row in rows),
            "computed_tokens": sum(
                computed_tokens(micro_batch, merge=bool(self._merge))
                for plan in plans[: len(plans) // self._trainer.epochs]
                for micro_batch in plan
            ),
            **off_policy,
            "train_seconds": time.perf_counter() - started,
            **self._take_metrics(),
        }

    def _look(self, rows: Sequence[Row]) -> View:
        """What the trainer wants to know of the rows before the first step."""
        if not self._trainer.needs_look:
            return View.of([])
        seen, _ = self._budget.fit(
            rows, lambda plan: self._step.survey(plan, self._trainer.look), self._forget
        )
        return View.of(seen)

    def _take(
        self, rows: Sequence[Row], judge: Callable[[], None]
    ) -> tuple[tuple[float, float], Plan]:
        return self._budget.fit(rows, lambda plan: self._step.take(plan, judge), self._forget)

    def _forget(self) -> None:
        """Undo half a step: nothing of it is left in gradients or figures."""
        self._trainer.optimizer.zero_grad()
        self._trainer.take_compared()
        self._trainer._metrics["train"].clear()

    def _version(self) -> int | None:
        """The version that the model is; None where it is none."""
        if isinstance(self._stands_at, Path):
            return int(self._stands_at.name)
        return 0 if self._stands_at is None else None

    def _judge_drift(self, newest: int | None) -> dict[str, Any]:
        seen = self.processes.gather(self._trainer.take_compared())
        compared = [row for rows in seen for row in rows]
        if not can_be_summed(compared):
            raise Unusable("what sampled some rows is too far from the policy to be calculated")
        found = off_policy_metrics(compared, newest)
        drift, bound = found["drift_kl"], self._recipe.off_policy.max_drift
        if drift is not None and drift > bound:
            raise DriftOutOfBounds(
                f"server and trainer differ by {drift:.3g} nats a token about version "
                f"{newest} (off_policy.max_drift is {bound:g}): nothing was trained; is the "
                "server's model, precision or --logprobs-mode another?",
                found,
            )
        return found

    def _take_metrics(self) -> dict[str, float]:
        """TRL's own, means over micro-batches, and the trainer's."""
        self._trainer.take_compared()
        kept = self._trainer._metrics["train"]
        means = {ours: _mean(kept[theirs]) for theirs, ours in FIGURES.items() if kept[theirs]}
        kept.clear()
        return means | self._trainer.figures()

    def logprobs(self, rows: Sequence[Row]) -> list[list[float]]:
        """Log-probabilities (S,) of each row's sampled tokens under the present policy, T = 1."""
        self._model.eval()
        with torch.no_grad():
            return [
                score_rows(
                    self._model, [_at_temperature_one(row)], merge=bool(self._merge)
                ).logprobs.tolist()
                for row in rows
            ]

    def save(self, folder: Path) -> None:
        """Write the adapter for the server, and what resuming needs (see `state`).

        All processes hold the same: the first writes.

        Raises:
            OSError: the disk does not take it; nothing has changed, and it may be tried again.
        """
        if self.processes.rank > 0:
            return
        try:
            self._model.save_pretrained(str(folder), safe_serialization=True)
        except SafetensorError as error:
            raise OSError(f"the adapter was not written: {error}") from error
        (folder / "README.md").unlink(missing_ok=True)
        save_state(self._parts(), self._step.taken, folder)

    def saved_as(self, adapter: Path) -> None:
        """What was trained last is now `adapter`: continuing from it needs no reading back."""
        self._stands_at = adapter


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _at_temperature_one(row: Row) -> Row:
    return msgspec.structs.replace(row, temperature=1.0)
