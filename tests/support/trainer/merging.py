"""Make rows that share prefixes, a model with an adapter, and policy gradients of both."""

import random
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import torch
from msgspec.structs import replace
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from store.values.sampling import Distribution
from trainer.batches import Layout, Row
from trainer.learners.kernels.layers import make_adapter_lean, make_base_lean
from trainer.learners.layouts import choose_layout
from trainer.learners.processes import Processes
from trainer.learners.scoring import score_rows, set_attention

RANK: Final = 16
CAP: Final = 2.0
PLAIN, COOL = Distribution(temperature=1.0), Distribution(temperature=0.7)
TINY: Final = LlamaConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=2048,
)


def random_tree(seed: int, vocabulary: int) -> list[Row]:
    """Make rows that fork anywhere, of mixed temperature, some the same, some without a fellow."""
    dice = random.Random(seed)
    words = random_words(vocabulary)
    known: list[tuple[int, ...]] = [()]
    rows = []
    for _ in range(dice.randint(2, 12)):
        stem = dice.choice(known)
        prompt = stem[: dice.randint(0, len(stem))] + cut_ids(dice, words, dice.randint(1, 8))
        sampled = cut_ids(dice, words, dice.randint(1, 8))
        rows.append(make_row(dice, prompt, sampled, dice.choice([COOL, PLAIN])))
        known.append(prompt + sampled)
    return weighted(rows)


def random_words(vocabulary: int) -> list[int]:
    """Draw ids for models that were never taught a text."""
    dice = random.Random(0)
    return [dice.randrange(vocabulary) for _ in range(10_000)]


def cut_ids(dice: random.Random, words: Sequence[int], count: int) -> tuple[int, ...]:
    start = dice.randrange(len(words) - count)
    return tuple(words[start : start + count])


def make_row(
    dice: random.Random,
    prompt: tuple[int, ...],
    sampled: tuple[int, ...],
    distribution: Distribution = PLAIN,
) -> Row:
    return Row(
        episode_id=UUID(int=dice.getrandbits(128)),
        agent="default",
        position=0,
        prompt_ids=prompt,
        sampled_ids=sampled,
        sampled_logprobs=tuple(dice.uniform(-8, -1) for _ in sampled),
        distribution=distribution,
        r_total=0.0,
        advantage=dice.choice([-1.0, 1.0]) * dice.uniform(0.2, 2),
        weight=1.0,
        version=0,
    )


def weighted(rows: Sequence[Row]) -> list[Row]:
    return [replace(row, weight=1 / len(rows)) for row in rows]


def make_model(source: LlamaConfig | Path, dtype: torch.dtype, *, lean: bool = True) -> Any:
    """Load the model in a folder, or make one of random weights; the same weights each time.

    Its adapter has an effect. `lean` False leaves transformers' and PEFT's own code as it is: the
    reference.
    """
    torch.manual_seed(0)
    how: dict[str, Any] = {"dtype": dtype, "attn_implementation": "sdpa"}
    if isinstance(source, Path):
        base = AutoModelForCausalLM.from_pretrained(source, **how)
    else:
        base = LlamaForCausalLM._from_config(deepcopy(source), **how)
    if lean:
        make_base_lean(base)
    torch.manual_seed(1)
    config = LoraConfig(
        r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    if dtype == torch.float64:
        model.double()
    if lean:
        make_adapter_lean(model)
        assert choose_layout(model, Processes()) == "tree"
    model.train()
    return model


def gradient(model: Any) -> Tensor:
    """Return all gradients in one vector, in float64; they are taken away."""
    gradients = [p.grad.flatten().double() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return torch.cat(gradients)


def largest_difference(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of two gradients, as a share of the largest entry."""
    return float((one - other).abs().max() / other.abs().max())


def train(model: Any, batches: Sequence[Sequence[Row]], *, layout: Layout) -> None:
    """Compute truncated importance-weighted policy gradients, micro-batch by micro-batch."""
    set_attention(model, layout)
    for rows in batches:
        logprobs = score_rows(model, rows, layout=layout).logprobs
        sampled = logprobs.new_tensor([one for row in rows for one in row.sampled_logprobs])
        worth = logprobs.new_tensor([worth_of(row) for row in rows for _ in row.sampled_ids])
        ratios = (logprobs.detach() - sampled).exp().clamp(max=CAP)
        torch.autograd.backward(-(ratios * worth * logprobs).sum())


def worth_of(row: Row) -> float:
    return row.advantage * row.weight / len(row.sampled_ids)
