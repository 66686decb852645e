"""Train on recorded calls with SFT: TRL's loss over the sampled tokens, Pawl's forward pass.

    Σ over sampled tokens of −weight · log π(token | tokens before it)

The rows are those of the episodes that the recipe's `[sft]` keeps, and their weights sum to one.
The policy is not compared with the sampled log-probabilities: there is no ratio, no baseline and
no advantage, and log π is that of the plain softmax (docs/decisions/023-ppo.md).

TRL's `compute_loss` calls its model for the log-probabilities of all labels. Here the call returns
those that Pawl computed, each times its token's weight in the loss. This is exact, because the loss
is linear in them; TRL's own mean over tokens would give long replies more weight than the recipe.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Never

import torch
from datasets import Dataset
from torch import Tensor
from trl import SFTConfig, SFTTrainer
from trl.trainer.utils import FusedCausalLMOutput

from trainer.batches import Layout, Row
from trainer.errors import LearnerError
from trainer.learners.kl import token_weights
from trainer.learners.losses.stored import StoredRows, set_up_trainer, trl_arguments
from trainer.recipes.recipe import Recipe


class StoredSftTrainer(StoredRows, SFTTrainer):
    """TRL's SFT trainer on recorded rows; only their sampled tokens carry loss."""

    @property
    def epochs(self) -> int:
        return self.recipe.sft.epochs

    def loss_of(self, rows: Sequence[Row]) -> Tensor:
        """Return the loss of one micro-batch, as its part of the sum over the optimiser step."""
        self.scored = self.score(rows)
        # TRL uses the mask only to count tokens.
        inputs = {"attention_mask": torch.ones_like(self.scored.entropies)}
        loss: Tensor = self.compute_loss(lambda **_: self._output(rows), inputs, False, 1)
        return loss + self.kl.loss(rows, self.scored.logprobs)

    def _output(self, rows: Sequence[Row]) -> FusedCausalLMOutput:
        """Return the model output that TRL expects, from the scores: values of each label, (M,)."""
        logprobs, entropies, _ = self.scored
        return FusedCausalLMOutput(
            log_probs=logprobs * token_weights(rows, logprobs.device),
            entropy=entropies,
            # Only for a metric of TRL that Pawl does not use.
            is_top1=torch.zeros_like(entropies),
            label_mask=torch.ones_like(entropies),
        )


def _rows_come_from_the_store(_: Any) -> Never:
    """Raise an error: TRL collates samples only if it runs its own loop."""
    raise LearnerError("TRL collated samples, but rows come from the store")


def make_sft_trainer(
    model: Any, tokenizer: Any, recipe: Recipe, folder: Path, *, layout: Layout
) -> StoredSftTrainer:
    """Return TRL's SFT trainer of `model` for recorded rows, which it computes in `layout`."""
    trainer = StoredSftTrainer(
        model=model,
        args=SFTConfig(
            **trl_arguments(model, recipe, folder),
            # Weights sum to one over all processes, whose gradients are added up.
            average_tokens_across_devices=False,
            dataset_kwargs={"skip_prepare_dataset": True},
        ),
        data_collator=_rows_come_from_the_store,
        train_dataset=Dataset.from_dict({"input_ids": [[0]], "labels": [[0]]}),
        processing_class=tokenizer,
    )
    set_up_trainer(trainer, recipe, layout=layout)
    return trainer
