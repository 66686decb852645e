"""Load a version of one policy, train it on an update's rows, and save it."""

import gc
import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeVar

import structlog
import torch

from store.claims import NON_FINITE
from store.values.packing import unpack_logprobs
from trainer.batches import (
    LAYOUTS,
    Layout,
    Row,
    RowKey,
    computed_tokens,
    plan_micro_batches,
    split_into_optimiser_steps,
    with_logprobs,
)
from trainer.errors import LONG_CALL_REMEDY, ShortOfMemory, Unusable
from trainer.learners.adapter import (
    OPTIMIZER,
    keep_layers_of_kind,
    layer_kind,
    load_state,
    save_adapter,
    save_state,
    write_foreign_adapter,
)
from trainer.learners.budget import (
    SMALLEST_BUDGET,
    MemoryRanOut,
    MicroBatches,
    TokenBudget,
    report_short_memory,
    too_long_error,
)
from trainer.learners.kernels.process import available_memory, give_freed_memory_back
from trainer.learners.kl import ByRow, cut_by_row, kl_by_row, kl_figures, measured_rows
from trainer.learners.layouts import choose_layout
from trainer.learners.losses.grpo import make_trainer
from trainer.learners.losses.ppo import make_ppo_trainer
from trainer.learners.losses.sft import make_sft_trainer
from trainer.learners.losses.stored import InitialValues
from trainer.learners.memory import Footprint, footprint, peak_bytes_of
from trainer.learners.model import Base, checkpoint_layers, is_checkpointed
from trainer.learners.off_policy import checked_metrics, mean_drift
from trainer.learners.scoring import plain_logprobs, score_rows, set_attention
from trainer.learners.self_test import (
    growing_rows,
    probe_rows,
    randomise_adapter,
    rehearsal_rows,
    vocabulary_probe,
)
from trainer.learners.steps import (
    OptimiserSteps,
    TrainedStep,
    check_initial_values,
    episodes_to_blame,
    fits_in_memory,
    update_figures,
)
from trainer.metrics import LONGEST_CALL
from trainer.recipes.recipe import Recipe
from trainer.updates.plan import OFF_POLICY

log = structlog.get_logger()

Result = TypeVar("Result")
# An update's overlap is measured on at least so many tokens, prompts included: if prompts have 200
# tokens and replies have two, fewer tokens would say nothing.
FEWEST_OVERLAP_TOKENS: Final = 8192
# The overlap is measured over parts of so many reply tokens. Averaging over single tokens would let
# the one decisive token of a reply of three move three times as far; comparing whole replies would
# hardly let long replies move.
REPLY_PART: Final = 4
# The smallest share of a step that is tried: a smaller step hardly moves the policy.
SMALLEST_STEP_SHARE: Final = 2.0**-10
UNSAVED = "trained on, and not saved as a version"
# Tokens of the longest row that is rehearsed: half a minute's work for 8B parameters on an H100.
LONGEST_TRIED: Final = 65_536
# The function that makes the TRL trainer, by the recipe's `learner`.
TRAINERS: Final = {
    "grpo": make_trainer,
    "ppo": make_ppo_trainer,
    "sft": make_sft_trainer,
    # A policy gradient too, with a teacher's advantages.
    "distill": make_trainer,
}
# TRL's metric names and Pawl's: the policy's entropy, and the share of clipped ratios.
TRL_METRICS: Final = {"entropy": "entropy", "clip_ratio/region_mean": "clip_share"}


class Learner:
    """Hold and train one policy's model, with TRL; `LearnerProtocol` documents the methods."""

    # None while another learner holds the base.
    _model: Any
    _trainer: Any
    _step: Any

    @report_short_memory("while an adapter was put on the base model")
    def __init__(
        self,
        model: str | Base,
        recipe: Recipe,
        seed: int,
        scratch: Path,
        *,
        layouts: Sequence[Layout] = LAYOUTS,
    ) -> None:
        """Put a new adapter on a base model, which several learners may use in turns.

        Args:
            model: the base model, or the folder or name of one to load.
            recipe: the recipe of the policy.
            seed: seed of the first adapter's weights.
            scratch: a folder where TRL may write.
            layouts: the layouts to choose from, best first; the last one is not tested.

        Raises:
            LearnerError: the model does not exist, or cannot be trained.
            ShortOfMemory: memory ran out.
        """
        self._base = model if isinstance(model, Base) else Base(model, recipe)
        self._recipe = recipe
        self._seed = seed
        self._scratch = scratch
        self._tokenizer = self._base.tokenizer
        self.processes = self._base.processes
        self.probe_rows = partial(probe_rows, self._tokenizer)
        self.vocabulary_probe = partial(vocabulary_probe, self._tokenizer)
        self.why_another_base = self._base.why_another_base
        self.why_unreplayable = self._base.why_unreplayable
        self.reply_ids = self._base.reply_ids
        self.set_served_context = self._base.set_served_context
        # The version that is loaded: its folder, None for a new adapter, or UNSAVED.
        self._loaded_version: Path | str | None = None
        self._interrupted = threading.Event()
        self._policy_logprobs: dict[RowKey, bytes] = {}
        self._memory_plan = self._footprint()
        self._model = self._base.attach(self, recipe, None, seed)
        self.layout = choose_layout(self._model, self.processes, layouts)
        self._budget = TokenBudget(
            recipe.batch.micro_batch_tokens,
            layout=self.layout,
            processes=self.processes,
            checkpoint=(
                self._checkpoint if recipe.batch.gradient_checkpointing == "auto" else None
            ),
        )
        self._make_trainer()
        self._plan_memory()

    def interrupt(self) -> None:
        self._interrupted.set()

    def forget_model(self) -> None:
        """Drop the model and its unsaved weights; only `restore` loads a version again."""
        self._loaded_version = UNSAVED
        self._model = self._trainer = self._step = None

    def _attach_adapter(self, adapter: Path | None) -> None:
        self._model = self._base.attach(self, self._recipe, adapter, self._seed)
        self._make_trainer()

    def _make_trainer(self) -> None:
        """Make the TRL trainer and the optimiser steps for the current model."""
        set_attention(self._model, self.layout)
        always = self._recipe.batch.gradient_checkpointing is True
        self._checkpoint(1.0 if always else self._budget.checkpointed_share)
        make = TRAINERS[self._recipe.learner]
        self._trainer = make(
            self._model, self._tokenizer, self._recipe, self._scratch, layout=self.layout
        )
        self._step = OptimiserSteps(self._trainer, self._interrupted, self.processes)

    def _footprint(self) -> Footprint | None:
        """Return the memory that training needs, or None if a process cannot plan it.

        All processes get a plan or none does: with a plan they compare their memory.
        """
        device = "cuda" if torch.cuda.is_available() else "cpu"
        plan = None
        try:
            plan = footprint(self._base.name, self._recipe, device)
            plan = plan.per_process(self.processes.count)
        except Exception as error:  # Training may still work.
            log.warning("memory_not_planned", reason=f"{type(error).__name__}: {error}"[:500])
        return plan if all(self.processes.gather(plan is not None)) else None

    def _plan_memory(self) -> None:
        """Record how long a call may be to fit into memory; warn if the context is longer.

        On a GPU, a row of that length is first trained on, and its peak memory corrects the plan.
        """
        if self._memory_plan is None:
            return
        if self._model.device.type == "cuda":
            self._correct_plan(self._memory_plan)
        longest = self._longest_row(self._memory_plan)
        LONGEST_CALL.set(longest)
        context = self._memory_plan.context
        if context is not None and longest < context:
            log.warning(
                "calls_too_long", past_tokens=longest, context=context, remedy=LONG_CALL_REMEDY
            )

    def _correct_plan(self, plan: Footprint) -> None:
        """Rehearse the longest row in all processes; after a failure the plan stays uncorrected."""
        failure: Exception | None = None
        try:
            self._rehearse_longest(plan)
        except Exception as error:  # Calls may all be shorter.
            failure = error
            self._undo_step()
            log.warning("longest_row_failed", reason=f"{type(error).__name__}: {error}"[:500])
        self.processes.regroup(failure)

    def _rehearse_longest(self, plan: Footprint) -> None:
        """Train on the longest row that should fit into memory, and correct the plan by its peak.

        If the row does not fit, a shorter one is tried. No row is longer than `LONGEST_TRIED`: the
        time of attention grows with the square of the length, and memory does not.
        """
        most = min(LONGEST_TRIED, plan.context or self._recipe.batch.micro_batch_tokens)
        peak = None
        while peak is None and (tokens := min(most, self._longest_row(plan))) >= SMALLEST_BUDGET:
            [row] = growing_rows(range(SMALLEST_BUDGET), 1, tokens, 1)
            self._memory_plan = plan
            self._budget.begin_update(math.ceil(self._checkpointed_share([row])))
            peak = peak_bytes_of(self._model.device, partial(self._can_train_on, row))
            is_saving = is_checkpointed(self._model.get_base_model())
            log.info("longest_row_tried", tokens=tokens, checkpointing=is_saving, peak_bytes=peak)
            plan = plan.corrected(tokens, peak, checkpointing=is_saving)
            # Errors hold the tensors of the frames that they passed, and the next attempt is
            # planned for the free memory.
            gc.collect()
            give_freed_memory_back()
        self._memory_plan = plan

    def _can_train_on(self, row: Row) -> bool:
        """Return whether a row fits into memory in training; the weights do not change."""
        try:
            initial = (
                self._step.survey([[row]], self._trainer.initial_values)
                if self._trainer.needs_initial_values
                else []
            )
        except MemoryRanOut:
            return False
        [row] = self._trainer.prepare([row], InitialValues.merge(initial))
        has_room = fits_in_memory(self._trainer, self.processes, row)
        self._undo_step()
        return has_room

    def _longest_row(self, plan: Footprint) -> int:
        """Return the tokens of the longest row that now fits into the memory of every process."""
        checkpointing = self._recipe.batch.gradient_checkpointing is not False
        longest = plan.tokens_that_fit(self._room(plan), checkpointing=checkpointing)
        return min(self.processes.gather(longest))

    def _room(self, plan: Footprint) -> int:
        return available_memory(self._model.device) + plan.loaded_bytes

    def _checkpoint(self, share: float) -> None:
        # While another learner holds the base, it is not changed: `_make_trainer` checkpoints it.
        if self._model is not None:
            checkpoint_layers(self._model.get_base_model(), share)

    def _checkpointed_share(self, rows: Sequence[Row], planned: int = 0) -> float:
        """Return the share of the layers to checkpoint, so that every process has room for `rows`.

        The largest micro-batch decides. It is at least as long as the longest row, and longer if
        that saves computation and it has at most `planned` tokens.
        """
        if self._memory_plan is None:
            return 0.0
        batch, sizes = self._recipe.batch, [row.size for row in rows]
        tokens = max(*sizes, min(batch.micro_batch_tokens, sum(sizes)))
        for step in split_into_optimiser_steps(rows, batch.steps):
            cut = plan_micro_batches(
                step, batch.micro_batch_tokens, layout=self.layout, most=planned
            )
            tokens = max(tokens, *(computed_tokens(own, layout=self.layout) for own in cut))
        return max(
            self.processes.gather(
                self._memory_plan.checkpointed_share(tokens, self._room(self._memory_plan))
            )
        )

    def _planned_tokens(self, rows: Sequence[Row]) -> int:
        """Return how many tokens should fit into memory at once, or 0 without a memory plan.

        On a CPU, rows that do not fit are refused, because the kernel would kill the trainer. On a
        GPU they are tried: there, running out of memory is an error that is handled.

        Raises:
            Unusable: some rows are too long for a CPU's memory.
            ShortOfMemory: all rows are too long, or a row of this length was trained on before.
        """
        if self._memory_plan is None:
            return 0
        longest = self._longest_row(self._memory_plan)
        refused = [row for row in rows if row.size > longest]
        if not refused or self._model.device.type == "cuda":
            return longest
        had_room = any(row.size <= self._budget.longest for row in refused)
        if had_room or len(refused) == len(rows):
            raise ShortOfMemory(
                f"the CPU's memory only has room for calls of {longest} tokens: {LONG_CALL_REMEDY}"
            )
        raise too_long_error(refused)

    @report_short_memory("while a version was loaded")
    def restore(self, adapter: Path | None) -> None:
        if adapter == self._loaded_version:
            return
        self._loaded_version = UNSAVED
        self._attach_adapter(adapter)
        if adapter is not None:
            load_state(self._resumable_objects(), adapter)
        self._loaded_version = adapter

    @report_short_memory("while the adapter of a self-test was made")
    def write_test_adapter(self, folder: Path, kind: str | None = None) -> list[Row]:
        self.restore(None)
        self._loaded_version = UNSAVED
        if kind is not None:
            keep_layers_of_kind(self._model, kind)
        rows = self.probe_rows()
        randomise_adapter(self._model, rows, self._seed)
        if self.processes.rank == 0:
            save_adapter(self._model, folder)
        return rows

    def layer_kinds(self) -> list[str]:
        """Load a new adapter, and return the kinds of its layers, each once."""
        self.restore(None)
        names = (name for name, _ in self._model.named_parameters() if "lora_B" in name)
        return list(dict.fromkeys(map(layer_kind, names)))

    def halve_micro_batches(self, halvings: int) -> int:
        self._budget.halve_micro_batches(halvings)
        return self._budget.tokens

    @report_short_memory("while an adapter was made anew")
    def leave_out_kinds(self, kinds: Collection[str]) -> None:
        """Leave layers of `kinds`, which the model server ignores, out of new adapters."""
        # The adapter of a self-test may have other layers.
        self.restore(None)
        self._loaded_version = UNSAVED
        self._base.leave_out_kinds(self._recipe, kinds)
        self.restore(None)

    def rehearse(self) -> None:
        """Train a new adapter on made-up rows, with as many tokens as a micro-batch may have."""
        self.restore(None)
        tokens = self._recipe.batch.micro_batch_tokens
        rows = rehearsal_rows(self.probe_rows(), tokens)
        sampled = zip([row.key for row in rows], self.version_logprobs(None, rows), strict=True)
        self.update(with_logprobs(rows, dict(sampled)))

    @report_short_memory("while an adapter was imported")
    def adopt(self, adapter: Path) -> None:
        """Load an adapter that was trained elsewhere, with a new optimiser state.

        Raises:
            AdapterError: the adapter cannot be a version; the message says why, and what to do.
            ShortOfMemory: memory ran out.
        """
        with TemporaryDirectory(prefix="pawl-adapter-") as name:
            write_foreign_adapter(self._model, self._base.hash, adapter, Path(name))
            self._loaded_version = UNSAVED
            self._attach_adapter(Path(name))

    def _resumable_objects(self) -> dict[str, Any]:
        """Return the objects whose state is saved and restored beside the adapter, by name."""
        return {OPTIMIZER: self._trainer.optimizer, **self._trainer.added_modules()}

    @report_short_memory("in an update, which was undone")
    def update(self, rows: Sequence[Row], step_share: float = 1.0) -> dict[str, Any]:
        rows = self._base.prepare_rows(rows)
        newest = self._model_version()
        self._loaded_version = UNSAVED
        planned = self._planned_tokens(rows)
        most = planned if planned and self._model.device.type == "cpu" else math.inf
        self._budget.begin_update(self._checkpointed_share(rows, planned), most, planned)
        self._step.share = step_share
        started = time.perf_counter()
        initial = self._initial_values(rows)
        check_initial_values(rows, initial)
        rows = self._trainer.prepare(rows, initial)
        measured = measured_rows(rows)
        overlap: dict[str, float] = {}
        # Imitation moves the policy to replies that it seldom gave: drift and trust region would
        # stop it.
        if self._recipe.imitation_rule is not None:
            trained, off_policy = self._take_steps(rows, newest)
        else:
            bound = self._recipe.off_policy.max_drift
            self._trainer.drift = mean_drift(measured, self._row_logprobs(measured), newest, bound)
            parameters, _ = self._trainer.trained_parameters()
            start = [parameter.detach().clone() for parameter in parameters]
            trained, off_policy = self._take_steps(rows, newest)
            # Rows of the first step have log-probabilities from before the policy moved.
            first = split_into_optimiser_steps(rows, self._recipe.batch.steps)[0]
            first = [row for row in first if not row.is_correction]
            if first:
                overlap = self._shorten_step(measured_rows(first, FEWEST_OVERLAP_TOKENS), start)
        metrics = self._take_metrics()
        kl_metrics = self._measure_kl_to_base(measured)
        give_freed_memory_back()
        seconds = time.perf_counter() - started
        return {
            **update_figures(rows, trained, self._trainer),
            **off_policy,
            **overlap,
            "train_seconds": seconds,
            **self._base.throughput.figures(rows, self._trainer.epochs, seconds),
            **metrics,
            **kl_metrics,
        }

    def policy_logprobs(self) -> dict[RowKey, bytes]:
        return self._policy_logprobs

    def _take_steps(
        self, rows: Sequence[Row], newest: int | None
    ) -> tuple[list[TrainedStep], dict[str, Any]]:
        """Take an update's optimiser steps; return the steps and the off-policy metrics.

        Raises:
            Unusable: a loss or gradient is not finite, server and trainer drift, or no row carries
                loss; the error names the episodes to blame.
            ShortOfMemory: memory ran out, in a step or in the search for rows to blame.
        """
        off_policy: dict[str, Any] = {}
        self._policy_logprobs = {}
        masked: list[bool] = []

        def check_drift() -> None:
            gathered = self.processes.gather(self._trainer.take_comparisons())
            compared = [row for rows in gathered for row in rows]
            masked.extend(row.masked for row in compared)
            # Only before the first step is the policy the newest version, and drift measurable.
            if not off_policy:
                bound = self._recipe.off_policy.max_drift
                off_policy.update(checked_metrics(compared, newest, bound))
            for row in compared:
                if row.key is not None:
                    self._policy_logprobs.setdefault(row.key, row.policy_logprobs)

        steps = split_into_optimiser_steps(rows, self._recipe.batch.steps) * self._trainer.epochs
        try:
            trained = [self._train_step(step, check_drift) for step in steps]
        except Unusable as error:
            self._undo_step()
            if error.reason != NON_FINITE:
                raise
            # All rows are searched: the culprit may have spoilt the baseline of its whole group.
            with report_short_memory("while rows with a loss that is not finite were searched"):
                blamed = episodes_to_blame(self._trainer, rows, self._step.stop_if_asked)
            raise Unusable(str(error), blamed) from error
        if masked and all(masked) and not any(row.is_correction for row in rows):
            # No weights have learned anything, but the optimiser's moments have changed.
            why = "no call carries loss: all are too far off the policy (off_policy.sequence_min)"
            raise Unusable(why, dict.fromkeys((row.episode_id for row in rows), why), OFF_POLICY)
        return trained, off_policy

    def _initial_values(self, rows: Sequence[Row]) -> InitialValues:
        """Return the rows' values before the first step; empty if the loss needs none."""
        if not self._trainer.needs_initial_values:
            return InitialValues.merge([])
        return InitialValues.merge(self._survey_in_parts(rows, self._trainer.initial_values))

    def _train_step(self, rows: Sequence[Row], check_drift: Callable[[], None]) -> TrainedStep:
        def run(cut: MicroBatches) -> tuple[float, float]:
            with self._base.throughput.computing():
                taken: tuple[float, float] = self._step.take(cut, check_drift)
            return taken

        (loss, norm), micro_batches = self._budget.run_fitting(
            rows,
            run,
            self._undo_step,
            partial(fits_in_memory, self._trainer, self.processes),
        )
        return TrainedStep(loss, norm, micro_batches)

    def _survey_in_parts(
        self, rows: Sequence[Row], compute: Callable[[Sequence[Row]], Result]
    ) -> list[Result]:
        """Cut rows so that they fit into memory; return the result of `compute` for each part."""

        def run(cut: MicroBatches) -> list[Result]:
            with self._base.throughput.computing():
                results: list[Result] = self._step.survey(cut, compute)
            return results

        def fits_by_itself(row: Row) -> bool:
            try:
                run([[row]])
            except MemoryRanOut:
                return False
            return True

        results, _ = self._budget.run_fitting(
            rows, run, self._undo_step, fits_by_itself, trains=False
        )
        return results

    def _shorten_step(self, rows: Sequence[Row], start: Sequence[torch.Tensor]) -> dict[str, float]:
        """Halve the distance of the parameters to `start` until they are in the trust region.

        This is TRPO's line search (arXiv:1502.05477, appendix C). In the region, the policies
        before and after the update overlap by at least `off_policy.min_overlap` on `rows`, which
        are of the first step. Return the `overlap`, and the share of the step that is kept
        (`step_kept`). If the overlap is not finite, `_measure_kl_to_base` raises the error.
        """
        parameters, _ = self._trainer.trained_parameters()
        least, share = self._recipe.off_policy.min_overlap, 1.0
        while (overlap := self._overlap(rows)) < least and share > SMALLEST_STEP_SHARE:
            share /= 2
            with torch.no_grad():
                for parameter, origin in zip(parameters, start, strict=True):
                    parameter.lerp_(origin, 0.5)
        if share < 1.0:
            log.warning("update_shortened", share=share, overlap=overlap)
        return {"overlap": overlap, "step_kept": share}

    def _overlap(self, rows: Sequence[Row]) -> float:
        """Estimate the overlap of the policies before and after: 1 − total variation distance.

        It is the mean of min(1, after/before) over parts of `REPLY_PART` tokens of the replies of
        `rows`, which are of the first step.
        """
        overlaps: list[float] = []
        for row, own in zip(rows, self._row_logprobs(rows), strict=True):
            before = unpack_logprobs(self._policy_logprobs[row.key])
            log_ratios = [new - old for new, old in zip(own, before, strict=True)]
            parts = (
                log_ratios[at : at + REPLY_PART] for at in range(0, len(log_ratios), REPLY_PART)
            )
            overlaps += [math.exp(min(sum(part), 0.0)) for part in parts]
        return fmean(overlaps)

    def _measure_kl_to_base(self, measured: Sequence[Row]) -> dict[str, Any]:
        """Return the metrics of the policy's KL to its base model, measured on the given rows."""
        measure = partial(kl_by_row, self._model, layout=self.layout)
        return kl_figures(measured, self._survey_in_parts(measured, measure))

    def _undo_step(self) -> None:
        """Undo an unfinished step: clear gradients, metrics, and scores that hold its tensors."""
        self._trainer.optimizer.zero_grad()
        self._trainer.scored = None
        self._trainer.take_comparisons()
        self._trainer._metrics["eval"].clear()

    def _model_version(self) -> int | None:
        """Return the number of the loaded version (0: the base), or None if it is not saved."""
        if isinstance(self._loaded_version, Path):
            return int(self._loaded_version.name)
        return 0 if self._loaded_version is None else None

    def _take_metrics(self) -> dict[str, float]:
        """Return TRL's metrics (means over micro-batches) and the trainer's own, and clear them."""
        self._trainer.take_comparisons()
        from_trl = self._trainer._metrics["eval"]
        means = {
            ours: fmean(from_trl[theirs])
            for theirs, ours in TRL_METRICS.items()
            if from_trl.get(theirs)
        }
        from_trl.clear()
        return {**means, **self._trainer.figures()}

    @report_short_memory("while log-probabilities were computed")
    def version_logprobs(self, adapter: Path | None, rows: Sequence[Row]) -> list[list[float]]:
        rows = self._base.prepare_rows(rows)
        if adapter is None:
            with self._model.disable_adapter():
                return self._row_logprobs(rows)
        if adapter != self._loaded_version:
            self._loaded_version = UNSAVED
            self._model = self._base.attach(self, self._recipe, adapter, self._seed)
        return self._row_logprobs(rows)

    def _row_logprobs(self, rows: Sequence[Row]) -> list[list[float]]:
        """Return the log-probabilities (S,) of each row's sampled tokens, by the current model."""

        def scored(micro_batch: Sequence[Row]) -> ByRow:
            with torch.no_grad():
                scores = score_rows(self._model, micro_batch, layout=self.layout)
            return cut_by_row(micro_batch, scores.logprobs)

        parts = self._survey_in_parts(rows, scored)
        values = {key: own for part in parts for key, own in part.items()}
        return [values[row.key] for row in rows]

    @report_short_memory("while log-probabilities were computed")
    def logprobs(self, rows: Sequence[Row]) -> list[list[float]]:
        with self._base.throughput.computing():
            return plain_logprobs(self._model, rows, layout=self.layout)

    @report_short_memory("while a version was written")
    def save(self, folder: Path) -> None:
        # All processes hold the same weights.
        if self.processes.rank > 0:
            return
        save_adapter(self._model, folder)
        save_state(self._resumable_objects(), self._base.hash, folder)

    def mark_saved(self, adapter: Path) -> None:
        """Take `adapter` as the saved current state, so that `restore` need not read it."""
        self._loaded_version = adapter
