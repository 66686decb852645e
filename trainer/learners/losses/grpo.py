"""Train on recorded calls with GRPO: TRL's loss, Pawl's micro-batches and forward pass.

The loss is TRL's `cispo` (MiniMax-M1, arXiv:2506.13585 §3.1), with the log-probabilities from
sampling as the old ones:

    −min(π/sampled, ratio_cap) · A · log π          (no gradient through the ratio)

This is a policy gradient with truncated importance weights, in one forward pass. The advantages
(B, T) include the rows' loss weights and the mean over a call's tokens, which is exact, as neither
is negative. Sequences too far off the policy carry no loss: TRL's hook for such a mask
(`get_off_policy_mask`) applies the rule in `trainer.learners.off_policy`.

A correction was not sampled: π's own log-probabilities take the place of the sampled ones, so that
its ratio is 1. With A = 1 its loss is that of `sft`, −log π.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor
from trl import import_utils

from store.values.packing import pack_logprobs
from trainer.batches import Layout, Row, with_logprobs
from trainer.errors import LearnerError
from trainer.learners.kl import cut_by_row
from trainer.learners.losses.stored import StoredRows, pad_rows, set_up_trainer, trl_arguments
from trainer.learners.off_policy import RowComparison, compare_rows, loss_mask
from trainer.recipes.recipe import OffPolicyOptions, Recipe


@contextmanager
def hide_vllm() -> Iterator[None]:
    """Hide vLLM from TRL within the block, which imports TRL's trainers.

    If vLLM is installed, TRL's GRPO trainer imports it to generate with it. Nothing is generated
    here, and vLLM would double the processor time of a trainer's start.
    """
    real = import_utils.is_vllm_available
    import_utils.is_vllm_available = lambda *_, **__: False
    try:
        yield
    finally:
        import_utils.is_vllm_available = real


with hide_vllm():
    from trl import GRPOConfig, GRPOTrainer

AnyTrainer = TypeVar("AnyTrainer", bound="StoredGrpoTrainer")


class StoredGrpoTrainer(StoredRows, GRPOTrainer):
    """TRL's GRPO trainer on recorded rows, without generating or tokenising.

    `off_policy` is the recipe's rule, and `drift` the mean difference between server and trainer in
    the present update (`trainer.learners.off_policy.mean_drift`).
    """

    off_policy: OffPolicyOptions
    drift: float
    _compared: list[RowComparison]

    needs_hidden = False

    def loss_of(self, rows: Sequence[Row]) -> Tensor:
        """Return the loss of one micro-batch, as its part of the sum over the optimiser step."""
        self.scored = self.score(rows, hidden=self.needs_hidden)
        own = cut_by_row(rows, self.scored.logprobs)
        corrections = {row.key: own[row.key] for row in rows if row.is_correction}
        self._rows = with_logprobs(rows, corrections)
        loss: Tensor = self._compute_loss(self.model, self.tensors_of(self._rows))
        return loss + self.kl.loss(self._rows, self.scored.logprobs)

    def tensors_of(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """Return the tensors that TRL's loss reads."""
        return collate(rows, self.accelerator)

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        **_: Any,
    ) -> tuple[Tensor, Tensor, None]:
        lengths = [len(row.sampled_ids) for row in self._rows]
        logprobs, entropies = self.scored.logprobs, self.scored.entropies
        return pad_rows(logprobs, lengths), pad_rows(entropies, lengths), None

    def get_off_policy_mask(self, per_token_logps: Tensor, mask: Tensor, **_: Any) -> Tensor:
        """Return 1 for each sequence that carries loss and 0 for the others, (B, 1).

        TRL multiplies its loss by this mask. `loss_mask` replaces TRL's own rule (DeepSeek-V3.2).
        The rows' comparisons with the policy are kept for `take_comparisons`.
        """
        policy = per_token_logps.detach()
        log_ratios = policy - _sampled_logprobs(self._rows).to(mask.device)
        rule = self.off_policy
        versions = [None if row.recomputed else row.version for row in self._rows]
        bounds = torch.tensor([rule.sequence_bounds(len(row.sampled_ids)) for row in self._rows])
        least, most = bounds.to(mask.device).split(1, dim=1)
        keeps = loss_mask(log_ratios, mask, least, most, self.drift)
        keeps[[row.is_correction for row in self._rows]] = 1.0
        compared = compare_rows(log_ratios, mask, keeps, versions, rule.ratio_cap)
        # Rows without weight only keep a process busy while others compute; they do not count.
        self._compared += [
            msgspec.structs.replace(
                comparison,
                key=row.key,
                policy_logprobs=pack_logprobs(own[: len(row.sampled_ids)]),
            )
            for comparison, row, own in zip(compared, self._rows, policy.tolist(), strict=True)
            if row.weight > 0 and not row.is_correction
        ]
        return keeps

    def take_comparisons(self) -> list[RowComparison]:
        taken, self._compared = self._compared, []
        return taken


def collate(rows: Sequence[Row], accelerator: Accelerator) -> dict[str, Tensor]:
    """Return the tensors that TRL's `_compute_loss` reads, of shapes (B, P) and (B, T).

    `advantages[b, t]` = advantage · weight / T_b, with the row's advantage or the token's, so that
    a row's share of the loss is its weight whatever its length. `num_items_in_batch` is 1 for each
    process, because weights sum to one already.
    """
    lengths = [len(row.sampled_ids) for row in rows]
    completion_ids = pad_rows(_flat_tensor([row.sampled_ids for row in rows], torch.long), lengths)
    mask = pad_rows(torch.ones(sum(lengths)), lengths)
    each = [
        advantage * row.weight / len(row.sampled_ids)
        for row in rows
        for advantage in row.token_advantages or [row.advantage] * len(row.sampled_ids)
    ]
    tensors = {
        # Pawl's forward pass reads the rows themselves; TRL only concatenates these.
        "prompt_ids": torch.zeros(len(rows), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(rows), 1, dtype=torch.long),
        "completion_ids": completion_ids,
        "completion_mask": mask,
        "old_per_token_logps": _sampled_logprobs(rows),
        "advantages": pad_rows(torch.tensor(each), lengths),
        "num_items_in_batch": torch.tensor(float(accelerator.num_processes)),
    }
    return {name: tensor.to(accelerator.device) for name, tensor in tensors.items()}


def _sampled_logprobs(rows: Sequence[Row]) -> Tensor:
    flat = _flat_tensor([row.sampled_logprobs for row in rows], torch.float32)
    return pad_rows(flat, [len(row.sampled_ids) for row in rows])


def _flat_tensor(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=dtype)


def _rewards_come_from_the_store(**_: Any) -> list[float]:
    """Raise an error: TRL requires a reward function, and calls it only if it generates."""
    raise LearnerError("TRL generated samples, but rows and rewards come from the store")


def make_trainer(
    model: Any, tokenizer: Any, recipe: Recipe, folder: Path, *, layout: Layout
) -> StoredGrpoTrainer:
    """Return TRL's GRPO trainer for recorded rows; `folder`, which TRL needs, stays empty."""
    loss = {"loss_type": "cispo", "epsilon_high": recipe.off_policy.ratio_cap}
    return build_trainer(StoredGrpoTrainer, model, tokenizer, recipe, folder, loss, layout=layout)


def build_trainer(
    kind: type[AnyTrainer],
    model: Any,
    tokenizer: Any,
    recipe: Recipe,
    folder: Path,
    loss: dict[str, Any],
    *,
    layout: Layout,
) -> AnyTrainer:
    """Return a trainer of class `kind`; `loss` has the arguments by which TRL selects its loss."""
    config = GRPOConfig(
        **trl_arguments(model, recipe, folder),
        **loss,
        # TRL calls `get_off_policy_mask` only if this is set; the rule is in `off_policy`.
        off_policy_mask_threshold=recipe.off_policy.sequence_max,
        # TRL's KL term is not weighted by rows; the term in `kl` is.
        beta=0.0,
        # TRL requires a group size and a batch that it divides; groups come from the store.
        num_generations=2,
        per_device_train_batch_size=2,
    )
    trainer = kind(
        model=model,
        args=config,
        reward_funcs=_rewards_come_from_the_store,
        train_dataset=Dataset.from_dict({"prompt": [""] * 4}),
        processing_class=tokenizer,
    )
    trainer.off_policy, trainer.drift, trainer._compared = recipe.off_policy, 0.0, []
    set_up_trainer(trainer, recipe, layout=layout)
    return trainer
