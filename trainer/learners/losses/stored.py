"""Train on recorded rows with TRL's trainers: the part that all losses share.

Nothing is generated, nothing is tokenised, and TRL's training loop does not run: a trainer provides
its loss and its optimiser, and `trainer.learners.steps` takes the steps.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.batches import Layout, Row
from trainer.learners.kl import ByRow, KlToBase, cut_by_row, with_kl_rewards
from trainer.learners.off_policy import RowComparison
from trainer.learners.scoring import Scored, score_rows
from trainer.recipes.recipe import Recipe


class InitialValues(NamedTuple):
    """Log-probabilities and values of an update's rows before its first step.

    `policy` are the log-probabilities of the policy in training, `base` those of the base model,
    and `values` are the critic's. Each is empty if the recipe does not need it.
    """

    policy: ByRow
    base: ByRow
    values: ByRow

    @classmethod
    def merge(cls, parts: Iterable["InitialValues"]) -> "InitialValues":
        """Merge the values of all micro-batches into one."""
        merged = cls({}, {}, {})
        for part in parts:
            for all_values, own in zip(merged, part, strict=True):
                all_values.update(own)
        return merged


class StoredRows:
    """Mixin for TRL's trainers that train on recorded rows, computed in a `layout`."""

    model: Any
    layout: Layout
    # Set by `set_up_trainer`.
    recipe: Recipe
    kl: KlToBase
    # The scores of the current micro-batch.
    scored: Scored

    @property
    def epochs(self) -> int:
        """Return how often an update trains on each row."""
        return 1

    @property
    def needs_initial_values(self) -> bool:
        """Return whether an update needs the `initial_values` of its rows."""
        return self.kl.is_wanted

    def initial_values(self, rows: Sequence[Row]) -> InitialValues:
        """Return a micro-batch's log-probabilities before the update's first step."""
        policy: ByRow = {}
        if self.kl.in_reward:
            with torch.no_grad():
                policy = cut_by_row(rows, self.score(rows).logprobs)
        return InitialValues(policy=policy, base=self.base_logprobs(rows), values={})

    def base_logprobs(self, rows: Sequence[Row]) -> ByRow:
        """Return log-probabilities under the base model; empty if the recipe has no KL penalty."""
        if not self.kl.is_wanted:
            return {}
        with torch.no_grad(), self.model.disable_adapter():
            return cut_by_row(rows, self.score(rows).logprobs)

    def score(self, rows: Sequence[Row], *, hidden: bool = False) -> Scored:
        """Score a micro-batch's sampled tokens under the current model."""
        return score_rows(self.model, rows, layout=self.layout, hidden=hidden)

    def prepare(self, rows: Sequence[Row], initial: InitialValues) -> list[Row]:
        """Start an update; return its rows, with KL rewards in the advantages if wanted."""
        self.kl.begin(initial.base)
        if not self.kl.in_reward:
            return list(rows)
        return with_kl_rewards(
            rows, {row.key: sum(self.kl.rewards(row, initial.policy[row.key])) for row in rows}
        )

    def added_modules(self) -> dict[str, torch.nn.Module]:
        """Return the modules trained beside the adapter, by the names of their files."""
        return {}

    def trained_parameters(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the trained parameters of the policy, and of the critic (here none)."""
        return [p for p in self.model.parameters() if p.requires_grad], []

    def take_comparisons(self) -> list[RowComparison]:
        """Return and clear the comparisons of rows with the policy (none without ratios)."""
        return []

    def figures(self) -> dict[str, float]:
        """Return the metrics of the last update that TRL does not compute."""
        return self.kl.figures()


def pad_rows(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Cut `values` (M,) into rows of `lengths`, padded with zeros: (B, max length)."""
    pieces = torch.split(values, list(lengths))
    return torch.nn.utils.rnn.pad_sequence(list(pieces), batch_first=True)


def trl_arguments(model: Any, recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Return the arguments that all of TRL's trainers get; `folder` stays unused."""
    return {
        "output_dir": str(folder),
        "learning_rate": recipe.optimizer.rate_for(model.config.get_text_config().hidden_size),
        "weight_decay": 0.0,
        "lr_scheduler_type": "constant",
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": not torch.cuda.is_available(),
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        # Routers are not trained: there is no load among experts to balance.
        "router_aux_loss_coef": 0.0,
    }


def set_up_trainer(trainer: Any, recipe: Recipe, *, layout: Layout) -> None:
    """Give a new trainer its recipe and its optimiser."""
    ratio_cap = recipe.off_policy.ratio_cap if recipe.imitation_rule is None else None
    trainer.layout, trainer.recipe, trainer.kl = layout, recipe, KlToBase(recipe.kl, ratio_cap)
    trainer.current_gradient_accumulation_steps = 1
    trainer.create_optimizer()
