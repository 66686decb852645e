"""Make one update in three ways: ours merged, ours separate, and TRL's own GRPO."""

import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.batches.micro_batches import plan_micro_batches
from trainer.batches.rows import Row
from trainer.learners.scoring import score_rows

CAP = 2.0
# Rows that TRL computes at once, its default; fewer long ones: eight of a thread's last turns
# take more than 20 GB, most of it logits.
TRL_ROWS = 8
TRL_TOKENS = 2400


def gradient(model: Any) -> Tensor:
    """Return all gradients in one vector, in float64; they are taken away."""
    found = [p.grad.flatten().double() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return torch.cat(found)


def largest_difference(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of two gradients, as a share of the largest entry."""
    return float((one - other).abs().max() / other.abs().max())


def train(model: Any, batches: Sequence[Sequence[Row]], *, merge: bool) -> None:
    """Compute truncated importance-weighted policy gradients, micro-batch by micro-batch."""
    for rows in batches:
        logprobs = score_rows(model, rows, merge=merge).logprobs
        sampled, worth = _columns(rows, logprobs)
        ratios = (logprobs.detach() - sampled).exp().clamp(max=CAP)
        loss = -(ratios * worth * logprobs).sum()
        torch.autograd.backward(loss)


def _columns(rows: Sequence[Row], like: Tensor) -> tuple[Tensor, Tensor]:
    sampled = [logprob for row in rows for logprob in row.sampled_logprobs]
    worth = [
        row.advantage * row.weight / len(row.sampled_ids) for row in rows for _ in row.sampled_ids
    ]
    return like.new_tensor(sampled), like.new_tensor(worth)


def plan(rows: Sequence[Row], budget: int, *, merge: bool = True) -> list[list[Row]]:
    """Return the micro-batches of `rows`."""
    return plan_micro_batches(rows, budget, merge=merge)


def trl_update(model: Any, rows: Sequence[Row]) -> tuple[Callable[[], None], int]:
    """Return what runs TRL's own GRPO loss (cispo) over padded rows, and the tokens it computes."""
    trainer = _trl_trainer(model)
    at_once = max(1, min(TRL_ROWS, TRL_TOKENS // max(len(row.ids) for row in rows)))
    batches = [_padded(rows[start : start + at_once]) for start in range(0, len(rows), at_once)]

    def run() -> None:
        for batch in batches:
            trainer._compute_loss(trainer.model, batch).backward()

    return run, sum(
        batch["prompt_ids"].numel() + batch["completion_ids"].numel() for batch in batches
    )


def _trl_trainer(model: Any) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="pawl-merge-"),
        loss_type="cispo",
        epsilon_high=CAP,
        beta=0.0,
        num_generations=2,
        per_device_train_batch_size=2,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
    )
    trainer = GRPOTrainer(
        model=model,
        args=config,
        reward_funcs=lambda **_: [],
        train_dataset=Dataset.from_dict({"prompt": [""] * 4}),
        processing_class=_words(),
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def _words() -> Any:
    """Make a tokenizer, as TRL wants one; nothing is tokenised."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="b", pad_token="b")


def _padded(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Return TRL's tensors: prompts padded on the left, completions on the right."""
    prompts = [torch.tensor(row.prompt_ids) for row in rows]
    sampled = [torch.tensor(row.sampled_ids) for row in rows]
    old = [torch.tensor(row.sampled_logprobs) for row in rows]
    worth = [row.advantage * row.weight / len(row.sampled_ids) for row in rows]
    return {
        "prompt_ids": _pad(prompts, "left"),
        "prompt_mask": _pad([torch.ones_like(ids) for ids in prompts], "left"),
        "completion_ids": _pad(sampled, "right"),
        "completion_mask": _pad([torch.ones_like(ids) for ids in sampled], "right"),
        "old_per_token_logps": _pad(old, "right"),
        "advantages": torch.tensor(worth)[:, None].expand(-1, max(map(len, sampled))),
        "num_items_in_batch": torch.tensor(1.0),
    }


def _pad(rows: Sequence[Tensor], side: str) -> Tensor:
    padded: Tensor = torch.nn.utils.rnn.pad_sequence(
        list(rows), batch_first=True, padding_side=side
    )
    return padded
