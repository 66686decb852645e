"""PPO on stored transitions (arXiv:1707.06347): TRL's clipped surrogate, our critic and GAE.

Before an update's first step one pass without gradient gives the trainer's own
log-probabilities, the old ones of the ratio, and the critic's values, from which
`trainer.gae` makes the advantages. The surrogate is TRL's `dapo` loss, the sum over tokens
of −min(ratio·A, clip(ratio)·A). What the rows were sampled from is corrected for by the
importance weight min(exp(old − sampled), cap), folded into A with the rows' weights
(exact: none is negative).
"""

from collections.abc import Sequence
from math import exp, log
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.gae import explained_variance, normalised, row_advantages
from trainer.learners.grpo import StoredGrpoTrainer, View, build_trainer, pad_rows
from trainer.learners.kl import ByRow, by_row, concatenated, token_weights
from trainer.learners.value_head import NAME, add_value_head, values_of
from trainer.recipe import Recipe
from trainer.rows import Row


class Targets(NamedTuple):
    """What an update holds fixed about its rows, of each sampled token."""

    old: ByRow
    values: ByRow
    returns: ByRow
    # With the importance weight, without the row's own.
    advantages: ByRow


class StoredPpoTrainer(StoredGrpoTrainer):
    """The stored rows' trainer with a critic; the rows' own advantages are not used."""

    needs_hidden = True
    # Set by `make_ppo_trainer`.
    critic: torch.nn.Linear

    @property
    def needs_look(self) -> bool:
        """Always: for the old log-probabilities and the critic's values."""
        return True

    @property
    def epochs(self) -> int:
        """How often an update goes through its rows."""
        return self.recipe.ppo.epochs

    def look(self, rows: Sequence[Row]) -> View:
        """A micro-batch as policy, critic and base see it at the update's start."""
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
        if credit.normalisation == "batch":
            advantages = normalised(advantages, weights, credit.smallest_spread)
        self._targets = Targets(
            old=view.policy,
            values=view.values,
            returns={row.key: found for row, found in zip(rows, returns, strict=True)},
            advantages={
                row.key: self._importance_weighted(row, view.policy[row.key], found)
                for row, found in zip(rows, advantages, strict=True)
            },
        )
        return list(rows)

    def _advantages(self, rows: Sequence[Row], view: View) -> list[list[float]]:
        ppo = self.recipe.ppo
        return row_advantages(
            rows,
            [view.values[row.key] for row in rows],
            [self.kl.rewards(row, view.policy[row.key]) for row in rows],
            gamma=ppo.gamma,
            trace=ppo.gae_lambda,
            by_agent=self.recipe.credit.assignment == "per_agent",
        )

    def _importance_weighted(
        self, row: Row, old: Sequence[float], advantages: Sequence[float]
    ) -> list[float]:
        """A row's advantages times its tokens' truncated importance weights."""
        most = log(self.recipe.off_policy.ratio_cap)
        return [
            advantage * exp(min(here - sampled, most))
            for advantage, here, sampled in zip(advantages, old, row.sampled_logprobs, strict=True)
        ]

    def tensors_of(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """What TRL's loss reads: the update's own old log-probabilities and advantages."""
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
        """Surrogate, KL and the critic's loss of one micro-batch."""
        return super().loss_of(rows) + self._critic_loss(rows)

    def _critic_loss(self, rows: Sequence[Row]) -> Tensor:
        """½ (V − return)², a token weighing as it does in the surrogate."""
        values = values_of(self.critic, self.scored)
        weights = token_weights(rows, values.device)
        returns = concatenated(rows, self._targets.returns, values.device)
        errors = (values - returns).square()
        bound = self.recipe.ppo.value_clip
        if bound is not None:
            before = concatenated(rows, self._targets.values, values.device)
            near = before + (values - before).clamp(-bound, bound)
            errors = torch.maximum(errors, (near - returns).square())
        loss = 0.5 * (weights * errors).sum()
        self._critic_errors += float(loss.detach())
        self._critic_weight += float(weights.sum())
        return loss

    def parts(self) -> dict[str, torch.nn.Module]:
        """The critic."""
        return {NAME: self.critic}

    def trained_parameters(self) -> tuple[list[Tensor], list[Tensor]]:
        """The policy's, and the critic's."""
        policy, _ = super().trained_parameters()
        critic: list[Tensor] = list(self.critic.parameters())
        return [p for p in policy if all(p is not own for own in critic)], critic

    def figures(self) -> dict[str, float]:
        """The last update's own figures."""
        found = super().figures()
        if self._critic_weight:
            found["value_loss"] = self._critic_errors / self._critic_weight
        if self._explained is not None:
            found["explained_variance"] = self._explained
        return found


def make_ppo_trainer(
    model: Any, tokenizer: Any, recipe: Recipe, folder: Path, *, merge: bool
) -> StoredPpoTrainer:
    """As `make_trainer`, with a critic that starts at zero."""
    clip = recipe.ppo.clip
    loss = {"loss_type": "dapo", "epsilon": clip, "epsilon_high": clip}
    trainer = build_trainer(StoredPpoTrainer, model, tokenizer, recipe, folder, loss, merge=merge)
    trainer.critic = add_value_head(trainer, recipe.ppo.value_learning_rate)
    return trainer
