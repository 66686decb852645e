"""Make a tiny model, and rows to train it on."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from store.values.sampling import Distribution
from trainer.batches import LAYOUTS, Layout, Row
from trainer.learners.learner import Learner
from trainer.learners.model import Base
from trainer.learners.self_test import growing_rows
from trainer.recipes.recipe import (
    BatchOptions,
    CreditOptions,
    KlOptions,
    LoraOptions,
    OffPolicyOptions,
    OptimizerOptions,
    PpoOptions,
    Recipe,
    SftOptions,
)

PLAIN = Distribution(temperature=1.0)
# Gives a learner as if the recipe had just made it.
Renew = Callable[[Recipe], Learner]


def write_tiny_model(folder: Path, seed: int = 0, hidden_size: int = 32) -> str:
    """Write a model of three layers: grouped-query attention, random weights, 97 words."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=hidden_size,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    write_words(folder)
    return str(folder)


def write_words(folder: Path) -> None:
    """Write a tokenizer of 97 words, w0 to w96."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = Tokenizer(WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1").save_pretrained(folder)


def write_chat_words(folder: Path) -> None:
    """Write the same with a template: w2 begins a turn, and w1 ends it."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = Tokenizer(WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    template = (
        "{% for message in messages %}w2 {{ message.content }} w1 {% endfor %}"
        "{% if add_generation_prompt %}w2 {% endif %}"
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="w1", unk_token="w0", chat_template=template
    )
    made.save_pretrained(folder)


def write_adapter(model: str, folder: Path, *, seed: int = 1, **config: Any) -> Path:
    """Write an adapter of `model` as another program saves it: with dropout, and an effect."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(seed)
    rank = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj"]}
    adapted = get_peft_model(base, LoraConfig(**(rank | {"task_type": "CAUSAL_LM"} | config)))
    with torch.no_grad():
        for name, weights in adapted.named_parameters():
            if "lora_B" in name:
                weights.normal_(std=0.05)
    # PEFT warns if it chooses by itself whether the embeddings are to be saved as well.
    adapted.save_pretrained(str(folder), save_embedding_layers=False)
    return folder


def recipe(**batch: Any) -> Recipe:
    """Make a recipe for the tiny model."""
    return Recipe(
        dtype="float32",
        lora=LoraOptions(rank=4, alpha=8),
        optimizer=OptimizerOptions(learning_rate=1e-2),
        batch=BatchOptions(**({"micro_batch_tokens": 64} | batch)),
        # The log-probabilities of `rows` are invented: nobody sampled them.
        off_policy=OffPolicyOptions(sequence_min=0.0, sequence_max=1e9, max_drift=1e9),
    )


def ppo_recipe(*, steps: int = 1, kl: KlOptions | None = None, **ppo: Any) -> Recipe:
    """Make the same recipe with PPO."""
    return recipe(steps=steps).model_copy(
        update={
            "learner": "ppo",
            "credit": CreditOptions(baseline="none", normalisation="batch"),
            "ppo": PpoOptions(**({"epochs": 1, "value_learning_rate": 1e-2} | ppo)),
            "kl": kl or KlOptions(),
        }
    )


def sft_recipe(*, kl: KlOptions | None = None, epochs: int = 1, **batch: Any) -> Recipe:
    """Make the same recipe with SFT."""
    return recipe(**batch).model_copy(
        update={
            "learner": "sft",
            "credit": CreditOptions(baseline="none", normalisation="none"),
            "sft": SftOptions(epochs=epochs),
            "kl": kl or KlOptions(),
        }
    )


def renewed(made: Learner, chosen: Recipe) -> Learner:
    """Give a learner a recipe, and a new adapter and optimiser, as one just made has.

    The base stays in memory, and the budget of a micro-batch as it is.
    """
    made._recipe = chosen
    made._attach_adapter(None)
    made._loaded_version = None
    return made


def in_every_layout(model: str, chosen: Recipe, folder: Path) -> Iterator[tuple[Layout, Learner]]:
    """Yield a new learner in each layout, one after the other: they share a base."""
    base = Base(model, chosen)
    for layout in LAYOUTS:
        # Taken untested: what is computed shows whether it is right.
        yield layout, Learner(base, chosen, seed=0, scratch=folder, layouts=(layout,))


def by_every_layout(
    model: str, chosen: Recipe, batch: list[Row], folder: Path
) -> dict[Layout, dict[str, Any]]:
    """Update a new learner in each layout; return their metrics, which must agree."""
    made = in_every_layout(model, chosen, folder)
    metrics = {layout: learner.update(batch) for layout, learner in made}
    for layout, found in metrics.items():
        assert math.isclose(found["loss"], metrics["whole"]["loss"], abs_tol=1e-5), layout
        assert math.isclose(found["grad_norm"], metrics["whole"]["grad_norm"], rel_tol=1e-4), layout
    return metrics


def grown(episodes: int = 2, turns: int = 20) -> list[Row]:
    """Make episodes whose calls add 16 tokens to the call before, but for thoughts of every second.

    From the fifth call on these continue a stretch.
    """
    made = growing_rows(range(2, 97), turns, 16 * turns, episodes)
    return [
        msgspec.structs.replace(
            row,
            episode_id=UUID(int=100 + row.episode_id.int),
            sampled_logprobs=(-4.5,) * len(row.sampled_ids),
            recomputed=False,
        )
        for row in made
    ]


def rows(seed: int = 0, groups: int = 3, members: int = 4) -> list[Row]:
    """Make groups that share a prompt, some of two turns, of mixed temperature."""
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(2, 97, (count,), generator=generator).tolist())

    found: list[Row] = []
    for _ in range(groups):
        prompt = ids(9)
        for member in range(members):
            sampled = ids(3 + member % 3)
            found.append(
                Row(
                    episode_id=UUID(int=len(found)),
                    agent="default",
                    position=0,
                    r_total=float(not member % 2),
                    prompt_ids=prompt if member % 2 else prompt + ids(2),
                    sampled_ids=sampled,
                    sampled_logprobs=(-4.5,) * len(sampled),
                    distribution=Distribution(temperature=0.7 if member == 1 else 1.0),
                    advantage=-0.8 if member % 2 else 1.0,
                    weight=1 / (groups * members),
                    version=0,
                )
            )
    return found
