"""Train on recorded calls with PPO: TRL's clipped surrogate, Pawl's critic and GAE.

PPO is arXiv:1707.06347 §3. Before an update's first step, one pass without gradient computes
the log-probabilities of the policy ("old" in the ratio) and the critic's values, from which GAE
derives the advantages. The surrogate is TRL's `dapo` loss:

    Σ over tokens of −min(ratio · A, clip(ratio, 1 − ε, 1 + ε) · A)

An older policy may have sampled the rows. A truncated importance weight corrects that:
min(exp(old − sampled), ratio_cap). It is multiplied into A together with the rows' weights, which
is exact, as neither is negative.
"""

from collections.abc import Sequence
from itertools import chain, groupby, pairwise
from math import exp, fsum, log, sqrt
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from trainer.batches import Layout, Row
from trainer.credit.advantages import SMALLEST_SPREAD
from trainer.credit.baselines import NORMALISATIONS
from trainer.learners.kl import ByRow, concatenate, cut_by_row, token_weights
from trainer.learners.losses.grpo import StoredGrpoTrainer, build_trainer
from trainer.learners.losses.stored import InitialValues, pad_rows
from trainer.learners.scoring import Scored
from trainer.recipes.recipe import Recipe

# The name of the critic in the model, and of its file.
CRITIC_NAME: Final = "value_head"


class Targets(NamedTuple):
    """Values of each sampled token, by row, that stay fixed during an update."""

    old: ByRow
    returns: ByRow
    # Including the importance weight, without the row's loss weight.
    advantages: ByRow


class StoredPpoTrainer(StoredGrpoTrainer):
    """Train on recorded rows with a critic; it replaces the rows' own advantages."""

    needs_hidden = True
    # Set by `make_ppo_trainer`.
    critic: torch.nn.Linear

    @property
    def needs_initial_values(self) -> bool:
        """Return True: old log-probabilities and values are always needed."""
        return True

    @property
    def epochs(self) -> int:
        return self.recipe.ppo.epochs

    def initial_values(self, rows: Sequence[Row]) -> InitialValues:
        """Return a micro-batch's log-probabilities and values before the update's first step."""
        with torch.no_grad():
            scored = self.score(rows, hidden=True)
            values = cut_by_row(rows, self._values(scored))
        return InitialValues(
            policy=cut_by_row(rows, scored.logprobs), base=self.base_logprobs(rows), values=values
        )

    def prepare(self, rows: Sequence[Row], initial: InitialValues) -> list[Row]:
        """Store the update's old log-probabilities, returns and advantages; return its rows."""
        self.kl.begin(initial.base)
        self._critic_errors = 0.0
        self._critic_weight = 0.0
        weights = [row.weight for row in rows]
        values = [initial.values[row.key] for row in rows]
        advantages = row_advantages(
            rows,
            values,
            [self.kl.rewards(row, initial.policy[row.key]) for row in rows],
            trace=self.recipe.ppo.gae_lambda,
            by_agent=self.recipe.credit.assignment == "per_agent",
        )
        returns = [
            [advantage + value for advantage, value in zip(*pair, strict=True)]
            for pair in zip(advantages, values, strict=True)
        ]
        self._explained = explained_variance(values, returns, weights)
        credit = self.recipe.credit
        if NORMALISATIONS[credit.normalisation].spread_over == "update":
            low, high = self.recipe.reward_range
            advantages = normalise_advantages(advantages, weights, (high - low) * SMALLEST_SPREAD)
        self._targets = Targets(
            old=initial.policy,
            returns={row.key: own for row, own in zip(rows, returns, strict=True)},
            advantages={
                row.key: self._importance_weighted(row, initial.policy[row.key], own)
                for row, own in zip(rows, advantages, strict=True)
            },
        )
        return list(rows)

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
        """Return the tensors for TRL's loss, with PPO's old log-probabilities and advantages."""
        device = self.accelerator.device
        lengths = [len(row.sampled_ids) for row in rows]
        advantages = token_weights(rows, device) * concatenate(
            rows, self._targets.advantages, device
        )
        tensors = super().tensors_of(rows)
        return tensors | {
            "sampling_per_token_logps": tensors["old_per_token_logps"],
            "old_per_token_logps": pad_rows(concatenate(rows, self._targets.old, device), lengths),
            "advantages": pad_rows(advantages, lengths),
        }

    def loss_of(self, rows: Sequence[Row]) -> Tensor:
        """Return the sum of surrogate, KL term and critic loss of one micro-batch."""
        return super().loss_of(rows) + self._critic_loss(rows)

    def _values(self, scored: Scored) -> Tensor:
        low, high = self.recipe.reward_range
        return critic_values(self.critic, scored, high - low)

    def _critic_loss(self, rows: Sequence[Row]) -> Tensor:
        """Return the sum of ½ (V − return)² over tokens, weighted as in the surrogate."""
        values = self._values(self.scored)
        weights = token_weights(rows, values.device)
        returns = concatenate(rows, self._targets.returns, values.device)
        errors = (values - returns).square()
        loss = 0.5 * (weights * errors).sum()
        self._critic_errors += float(loss.detach())
        self._critic_weight += float(weights.sum())
        return loss

    def added_modules(self) -> dict[str, torch.nn.Module]:
        """Return the critic by the name of its file."""
        return {CRITIC_NAME: self.critic}

    def trained_parameters(self) -> tuple[list[Tensor], list[Tensor]]:
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
    model: Any, tokenizer: Any, recipe: Recipe, folder: Path, *, layout: Layout
) -> StoredPpoTrainer:
    """Return a trainer for recorded rows with PPO's loss, and a critic that starts at zero."""
    clip = recipe.ppo.clip
    loss = {"loss_type": "dapo", "epsilon": clip, "epsilon_high": clip}
    trainer = build_trainer(StoredPpoTrainer, model, tokenizer, recipe, folder, loss, layout=layout)
    trainer.critic = add_value_head(trainer, recipe.ppo.value_learning_rate)
    return trainer


def add_value_head(trainer: Any, learning_rate: float) -> torch.nn.Linear:
    """Add a critic to the trainer's model and to its optimiser, and return the critic.

    The critic is one linear layer on the LM head's inputs. It belongs to the PEFT wrapper, not to
    the base model, and disappears with it: the base that other policies share keeps no critic.
    LoRA's "all-linear" does not adapt it, and PEFT's adapter file, which the model server reads,
    does not contain it. It starts at zero, so that the first update's advantages are its returns.
    """
    model = trainer.model
    width = model.get_output_embeddings().in_features
    head = torch.nn.Linear(width, 1, device=model.device, dtype=torch.float32)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    model.add_module(CRITIC_NAME, head)
    trainer.optimizer.add_param_group(
        {"params": list(head.parameters()), "lr": learning_rate, "weight_decay": 0.0}
    )
    return head


def critic_values(critic: torch.nn.Linear, scored: Scored, width: float) -> Tensor:
    """Return V before each sampled token, (M,), from the hidden states that predict the token.

    The states are detached: the value loss moves the critic and never the policy's adapter.
    They are scaled to length one, and the critic's outputs are multiplied by `width`, the width of
    the rewards' range. So a step of Adam moves a value by at most √H · learning rate · `width`,
    whatever the scale of the model's states and of the rewards.
    """
    assert scored.hidden is not None
    states = torch.nn.functional.normalize(scored.hidden.detach().to(critic.weight.dtype), dim=-1)
    values: Tensor = width * critic(states)[:, 0]
    return values


class ValuedCall(NamedTuple):
    """A trained call with S sampled tokens, its return and the critic's values.

    `r_total` is the call's return from credit assignment. Shapes: `values` (S,), V before each
    token; `rewards` (S,), each token's own reward (the KL penalty, or zeros).
    """

    r_total: float
    values: Sequence[float]
    rewards: Sequence[float]


def call_rewards(totals: Sequence[float]) -> list[float]:
    """Return the calls' rewards, (K,); `totals` are their sums from each call to the last."""
    return [here - after for here, after in pairwise([*totals, 0.0])]


def estimate_gae(rewards: Sequence[float], values: Sequence[float], trace: float) -> list[float]:
    """Return the GAE advantages of one chain of T tokens; all shapes are (T,), `trace` is λ."""
    advantages = [0.0] * len(rewards)
    value_after, advantage_after = 0.0, 0.0
    for step in reversed(range(len(rewards))):
        delta = rewards[step] + value_after - values[step]
        advantages[step] = delta + trace * advantage_after
        value_after, advantage_after = values[step], advantages[step]
    return advantages


def episode_advantages(calls: Sequence[ValuedCall], trace: float) -> list[list[float]]:
    """Return the advantages of all tokens of an episode's trained `calls`, given by position."""
    last_rewards = call_rewards([call.r_total for call in calls])
    rewards = [
        reward + (last_reward if token == len(call.rewards) - 1 else 0.0)
        for call, last_reward in zip(calls, last_rewards, strict=True)
        for token, reward in enumerate(call.rewards)
    ]
    values = list(chain.from_iterable(call.values for call in calls))
    remaining = iter(estimate_gae(rewards, values, trace))
    return [[next(remaining) for _ in call.values] for call in calls]


def row_advantages(
    rows: Sequence[Row],
    values: Sequence[Sequence[float]],
    rewards: Sequence[Sequence[float]],
    *,
    trace: float,
    by_agent: bool,
) -> list[list[float]]:
    """Return the advantages of all tokens of an update's rows, which come in any order.

    It is GAE (arXiv:1506.02438 §3) over one chain of tokens: those of an episode's trained calls,
    by position. The state after a call's last token is the prompt of the next trained call; calls
    between them that are not trained belong to the environment. With λ = `trace` for each token:

        δ_t = reward_t + V_{t+1} − V_t          V after the last token is 0
        A_t = δ_t + λ · A_{t+1}

    Nothing is discounted: an episode's end is worth as much to its first call as to its last. A
    call's last token has its reward, derived from the returns G_k of credit assignment:

        reward of call k = G_k − G_{k+1},  of the last call G_K

    So the return of every token is the `r_total` of its call, whatever the assignment: if all calls
    have the same return, the last one gets the only reward.

    `values` and `rewards` (further rewards of each token) hold one sequence (S,) for each row, and
    so does the result. With `by_agent` the calls of each agent of an episode are a separate chain:
    if each agent has its own return, the other agents belong to its environment.
    """

    def chain_of(index: int) -> tuple[str, str]:
        """Return the chain that a row belongs to."""
        row = rows[index]
        return str(row.episode_id), row.agent if by_agent else ""

    by_row: list[list[float]] = [[] for _ in rows]
    order = sorted(range(len(rows)), key=lambda index: (*chain_of(index), rows[index].position))
    for _, group in groupby(order, key=chain_of):
        indices = list(group)
        calls = [ValuedCall(rows[i].r_total, values[i], rewards[i]) for i in indices]
        for index, advantages in zip(indices, episode_advantages(calls, trace), strict=True):
            by_row[index] = advantages
    return by_row


def normalise_advantages(
    rows: Sequence[Sequence[float]], weights: Sequence[float], smallest_spread: float
) -> list[list[float]]:
    """Return the advantages minus their mean, divided by their spread.

    Mean and spread weigh tokens as the loss does: a row's weight is divided among its tokens, so
    that a long call counts no more than a short one. The spread is at least `smallest_spread`.
    """
    mean, variance = _moments(rows, weights)
    spread = max(sqrt(variance), smallest_spread)
    return [[(advantage - mean) / spread for advantage in row] for row in rows]


def explained_variance(
    values: Sequence[Sequence[float]], returns: Sequence[Sequence[float]], weights: Sequence[float]
) -> float | None:
    """Return 1 − Var(return − V) / Var(return), or None if the returns do not vary.

    1: the critic is perfect; 0: it is no better than a constant.
    """
    errors = [
        [target - value for value, target in zip(row, targets, strict=True)]
        for row, targets in zip(values, returns, strict=True)
    ]
    _, variance = _moments(returns, weights)
    _, unexplained = _moments(errors, weights)
    return 1.0 - unexplained / variance if variance > 0.0 else None


def _moments(rows: Sequence[Sequence[float]], weights: Sequence[float]) -> tuple[float, float]:
    """Return weighted mean and variance over tokens; a row's weight is divided among its tokens."""
    shares = [
        (value, weight / len(row))
        for row, weight in zip(rows, weights, strict=True)
        for value in row
    ]
    total = fsum(share for _, share in shares)
    mean = fsum(value * share for value, share in shares) / total
    return mean, fsum((value - mean) ** 2 * share for value, share in shares) / total
