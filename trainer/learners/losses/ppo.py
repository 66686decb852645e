"""Train stored transitions with PPO: TRL's clipped surrogate, Pawl's critic and GAE.

PPO is arXiv:1707.06347 §3. Before an update's first step, one pass without gradient gives
the trainer's own log-probabilities, which are the old ones of the ratio, and the critic's
values, from which `trainer.learners.critic.gae` derives the advantages. The surrogate is
TRL's `dapo` loss:

    Σ over tokens of −min(ratio · A, clip(ratio, 1 − ε, 1 + ε) · A)

The rows may come from an older policy. That is corrected by the truncated importance weight
min(exp(old − sampled), ratio_cap), folded into A together with the rows' weights (exact:
neither is negative).
"""

from collections.abc import Sequence
from math import exp, log
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.batches import Row
from trainer.credit.advantages import SMALLEST_SPREAD
from trainer.credit.baselines import NORMALISATIONS
from trainer.learners.critic.gae import explained_variance, normalised, row_advantages
from trainer.learners.critic.value_head import NAME, add_value_head, values_of
from trainer.learners.losses.grpo import StoredGrpoTrainer, build_trainer
from trainer.learners.losses.kl import ByRow, by_row, concatenated, token_weights
from trainer.learners.losses.stored import View, pad_rows
from trainer.recipes.recipe import Recipe


class Targets(NamedTuple):
    """Hold the values that an update keeps fixed for each sampled token, by row."""

    old: ByRow
    returns: ByRow
    # Including the importance weight, without the row's loss weight.
    advantages: ByRow


class StoredPpoTrainer(StoredGrpoTrainer):
    """Train stored rows with a critic; the rows' own advantages are not used."""

    needs_hidden = True
    # Set by `make_ppo_trainer`.
    critic: torch.nn.Linear

    @property
    def needs_view(self) -> bool:
        """Return True: old log-probabilities and values are always needed."""
        return True

    @property
    def epochs(self) -> int:
        """Return how often an update goes through its rows."""
        return self.recipe.ppo.epochs

    def view(self, rows: Sequence[Row]) -> View:
        """Return a micro-batch as policy, critic and base see it before the update's first step."""
        with torch.no_grad():
            scored = self.score(rows, hidden=True)
            values = by_row(rows, values_of(self.critic, scored))
        return View(
            policy=by_row(rows, scored.logprobs), base=self.base_logprobs(rows), values=values
        )

    def prepare(self, rows: Sequence[Row], view: View) -> list[Row]:
        """Fix old log-probabilities, values, returns and advantages of an update's rows."""
        self.kl.begin(view.base)
        self._critic_errors = 0.0
        self._critic_weight = 0.0
        weights = [row.weight for row in rows]
        values = [view.values[row.key] for row in rows]
        advantages = self._advantages(rows, view)
        returns = [
            [advantage + value for advantage, value in zip(*pair, strict=True)]
            for pair in zip(advantages, values, strict=True)
        ]
        self._explained = explained_variance(values, returns, weights)
        credit = self.recipe.credit
        if NORMALISATIONS[credit.normalisation].spread_over == "update":
            advantages = normalised(advantages, weights, SMALLEST_SPREAD)
        self._targets = Targets(
            old=view.policy,
            returns={row.key: own for row, own in zip(rows, returns, strict=True)},
            advantages={
                row.key: self._importance_weighted(row, view.policy[row.key], own)
                for row, own in zip(rows, advantages, strict=True)
            },
        )
        return list(rows)

    def _advantages(self, rows: Sequence[Row], view: View) -> list[list[float]]:
        ppo = self.recipe.ppo
        return row_advantages(
            rows,
            [view.values[row.key] for row in rows],
            [self.kl.rewards(row, view.policy[row.key]) for row in rows],
            trace=ppo.gae_lambda,
            by_agent=self.recipe.credit.assignment == "per_agent",
        )

    def _importance_weighted(
        self, row: Row, old: Sequence[float], advantages: Sequence[float]
    ) -> list[float]:
        """Return a row's advantages times its tokens' truncated importance weights, (S,)."""
        most = log(self.recipe.off_policy.ratio_cap)
        return [
            advantage * exp(min(here - sampled, most))
            for advantage, here, sampled in zip(advantages, old, row.sampled_logprobs, strict=True)
        ]

    def tensors_of(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """Return the tensors that TRL's loss reads: with PPO's old values and advantages."""
        device = self.accelerator.device
        lengths = [len(row.sampled_ids) for row in rows]
        advantages = token_weights(rows, device) * concatenated(
            rows, self._targets.advantages, device
        )
        tensors = super().tensors_of(rows)
        return tensors | {
            "sampling_per_token_logps": tensors["old_per_token_logps"],
            "old_per_token_logps": pad_rows(concatenated(rows, self._targets.old, device), lengths),
            "advantages": pad_rows(advantages, lengths),
        }

    def loss_of(self, rows: Sequence[Row]) -> Tensor:
        """Return the sum of surrogate, KL term and critic loss of one micro-batch."""
        return super().loss_of(rows) + self._critic_loss(rows)

    def _critic_loss(self, rows: Sequence[Row]) -> Tensor:
        """Return ½ (V − return)², each token with its weight in the surrogate."""
        values = values_of(self.critic, self.scored)
        weights = token_weights(rows, values.device)
        returns = concatenated(rows, self._targets.returns, values.device)
        errors = (values - returns).square()
        loss = 0.5 * (weights * errors).sum()
        self._critic_errors += float(loss.detach())
        self._critic_weight += float(weights.sum())
        return loss

    def added_modules(self) -> dict[str, torch.nn.Module]:
        """Return the critic, to be saved and resumed."""
        return {NAME: self.critic}

    def trained_parameters(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the trained parameters of the policy, and those of the critic."""
        policy, _ = super().trained_parameters()
        critic: list[Tensor] = list(self.critic.parameters())
        return [p for p in policy if all(p is not own for own in critic)], critic

    def figures(self) -> dict[str, float]:
        """Return GRPO's metrics, the critic's loss and the explained variance."""
        figures = super().figures()
        if self._critic_weight:
            figures["value_loss"] = self._critic_errors / self._critic_weight
        if self._explained is not None:
            figures["explained_variance"] = self._explained
        return figures


def make_ppo_trainer(
    model: Any, tokenizer: Any, recipe: Recipe, folder: Path, *, merge: bool
) -> StoredPpoTrainer:
    """Return a TRL trainer around `model` with PPO's loss, and a critic that starts at zero."""
    clip = recipe.ppo.clip
    loss = {"loss_type": "dapo", "epsilon": clip, "epsilon_high": clip}
    trainer = build_trainer(StoredPpoTrainer, model, tokenizer, recipe, folder, loss, merge=merge)
    trainer.critic = add_value_head(trainer, recipe.ppo.value_learning_rate)
    return trainer
