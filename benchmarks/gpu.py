"""Measure updates of a large model on one GPU, beside TRL's asynchronous GRPO on the same rows.

A model of random weights, of the shape of Qwen3-8B or of `--config`, trains on episodes in which
each call extends the one before. One update is timed in each layout, and then as TRL 1.16 packs it
(`trl.experimental.async_grpo`): prefix trees, its fused head and its loss, with PEFT's own layers.
TRL loads FlashAttention 3 from a hub; if the hub cannot be reached, torch's FlashAttention replaces
it. At last, half of the GPU's memory is taken, as by a model server, and episodes whose longest
call has 32,768 tokens are trained. Tokens are counted once where calls share them; MFU counts the
operations that these need (`trainer.learners.flops`), not recomputation.

Needs a GPU; `--quick` runs all but TRL's part on a CPU, with a tiny model. Ends with status 1 if a
bar is missed.
"""

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import msgspec
import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AutoConfig, AutoModelForCausalLM
from trl.experimental.async_grpo import packing
from trl.trainer.utils import add_fused_lm_head

from benchmarks.report import Bar, Rows, bars_table, number
from tests.support.training import write_words
from trainer.batches import Layout, Row, tokens_and_pairs
from trainer.errors import Unusable
from trainer.learners.flops import model_flops, peak_flops
from trainer.learners.learner import Learner
from trainer.learners.model import Base
from trainer.learners.self_test import growing_rows
from trainer.recipes.recipe import Recipe, load_recipe

GIB: Final = 2**30
# Qwen3-8B's config.json, only the fields that change a size.
QWEN3_8B: Final[dict[str, Any]] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
TINY: Final = QWEN3_8B | {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
# Tokens of the longest call beside a model server, and the server's share of the GPU's memory.
LONG: Final = 32768
SERVED: Final = 0.5
LEAST_MFU: Final = 0.35
TRL: Final = "TRL's packing"


class MeasuredUpdate(NamedTuple):
    """One measured update; `tokens` are the distinct tokens, `flops` the operations they need."""

    name: str
    seconds: float
    tokens: int
    computed: int
    peak_gib: float
    flops: float


class Packing(NamedTuple):
    """An update with TRL's packing: the function that runs it, and the tokens that it computes."""

    run: Callable[[], None]
    computed: int


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--config", type=Path, help="a config.json; left out: Qwen3-8B's shape")
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--context", type=int, default=16384, help="tokens of the longest call")
    parser.add_argument("--only", nargs="+", default=["tree", "chain", "trl", "long"])
    parser.add_argument("--quick", action="store_true", help="tiny model, a few rows, no GPU")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not options.quick:
        parser.error("there is no GPU: --quick runs all but TRL's part on a CPU")
    shape = TINY if options.quick else QWEN3_8B
    if options.config is not None:
        shape = AutoConfig.from_pretrained(options.config).to_dict()
    long, context, episodes = LONG, options.context, options.episodes
    if options.quick:
        long, context, episodes = 256, min(context, 128), min(episodes, 2)
    with tempfile.TemporaryDirectory(prefix="pawl-gpu-") as folder:
        write_model(Path(folder), shape)
        rows = made_rows(shape, options.turns, context, episodes)
        measured = measure(Path(folder), rows, options.only)
        spent = None
        if "long" in options.only:
            spent = count_too_long(Path(folder), made_rows(shape, options.turns, long, 2))
    promises = bars(measured, spent, counts=on_gpu and not options.quick)
    for table in (updates_table(measured, options, context), bars_table(promises)):
        Console().print(table.rich())
    sys.exit(0 if all(bar.holds is not False for bar in promises) else 1)


def write_model(folder: Path, shape: dict[str, Any]) -> None:
    """Write a model of random weights (made on the GPU if there is one), and a tokenizer."""
    config = AutoConfig.for_model(**shape)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    write_words(folder)


def made_rows(shape: dict[str, Any], turns: int, context: int, episodes: int) -> list[Row]:
    """Return episodes of one task; their tokens are random, as are the log-probabilities."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(shape["vocab_size"], (context,), generator=generator).tolist()
    return [
        msgspec.structs.replace(row, sampled_logprobs=(-10.0,) * len(row.sampled_ids))
        for row in growing_rows(ids, turns, context, episodes)
    ]


def training_recipe() -> Recipe:
    """Return the default recipe; made-up log-probabilities exclude no row from training."""
    recipe = load_recipe("default")
    anything = recipe.off_policy.model_copy(update={"sequence_min": 0.0, "sequence_max": 1e9})
    return recipe.model_copy(update={"off_policy": anything})


def measure(folder: Path, rows: Sequence[Row], names: Sequence[str]) -> list[MeasuredUpdate]:
    """Measure an update of `rows` in each of the layouts, and as TRL packs it."""
    recipe = training_recipe()
    flops = needed_flops(folder, rows)
    distinct, _ = tokens_and_pairs(rows)
    few = [row for row in rows if row.episode_id.int < 2]
    measured = []
    base = Base(str(folder), recipe)
    layouts: tuple[Layout, ...] = ("tree", "chain")
    for layout in layouts:
        if layout in names:
            learner = Learner(base, recipe, seed=0, scratch=folder / layout, layouts=(layout,))
            learner.update(few)
            seconds, peak, figures = time_update(partial(learner.update, rows))
            computed = figures["computed_tokens"]
            measured.append(MeasuredUpdate(layout, seconds, distinct, computed, peak, flops))
            learner.forget_model()
    del base
    free_gpu_memory()
    if "trl" in names and torch.cuda.is_available():
        torch.use_deterministic_algorithms(False)
        model = trl_model(folder, recipe)
        trl_packing(model, few, recipe).run()
        packed = trl_packing(model, rows, recipe)
        seconds, peak, _ = time_update(packed.run)
        measured.append(MeasuredUpdate(TRL, seconds, distinct, packed.computed, peak, flops))
        del model, packed
        free_gpu_memory()
    return measured


def time_update(update: Callable[[], Any]) -> tuple[float, float, Any]:
    """Return an update's seconds, its peak memory in GiB (0 without a GPU), and its result."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    began = time.perf_counter()
    result = update()
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return seconds, torch.cuda.max_memory_allocated() / GIB if on_gpu else 0.0, result


def free_gpu_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def needed_flops(folder: Path, rows: Sequence[Row]) -> float:
    """Return the operations that the rows need if each distinct token is computed once."""
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    scored = sum(len(row.sampled_ids) for row in rows)
    return model_flops(outline).training_flops(*tokens_and_pairs(rows), scored)


def trl_model(folder: Path, recipe: Recipe) -> Any:
    """Return the model as `AsyncGRPOTrainer` makes it, with the recipe's adapter."""
    packing.register_tree_attention()
    try:
        packing._flash_attn()
    except Exception as error:  # No hub, or no such kernel for this card.
        print(f"TRL's FlashAttention 3 cannot be loaded, torch's replaces it: {error}"[:200])
        packing._flash_attn = lambda: TorchFlashAttention
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation=packing.TREE_ATTENTION
    )
    model.cuda()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    lora = LoraConfig(
        r=recipe.lora.rank,
        lora_alpha=recipe.lora.alpha,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(model, lora)
    adapted.enable_input_require_grads()
    adapted.gradient_checkpointing_enable({"use_reentrant": False})
    return adapted.train()


class TorchFlashAttention:
    """torch's FlashAttention, under the name of the kernel that TRL loads from the hub."""

    @staticmethod
    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts_q: Tensor,
        starts_k: Tensor,
        longest_q: int,
        longest_k: int,
        *,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
    ) -> Tensor:
        """Compute causal attention within each of the concatenated sequences."""
        # Older releases have no such parameter, and always accept grouped heads.
        has_parameter = "enable_gqa" in signature(varlen_attn).parameters
        named: dict[str, Any] = {"enable_gqa": True} if has_parameter else {}
        named |= {"scale": softmax_scale, "window_size": (-1, 0)}
        out = varlen_attn(q, k, v, starts_q, starts_k, longest_q, longest_k, **named)
        return cast("Tensor", out)


def trl_packing(model: Any, rows: Sequence[Row], recipe: Recipe) -> Packing:
    """Return TRL's update on `rows`: trees are filled sample by sample, up to the token budget."""
    # A row that is a prefix of another one takes one more token in the tree.
    longest = max(row.size for row in rows) + max(row.position for row in rows)
    budget = max(recipe.batch.micro_batch_tokens, longest)
    trees = [packing.TreeRow()]
    for row in rows:
        sample = trl_sample(row)
        if trees[-1].samples and not trees[-1].fits(sample, budget):
            trees.append(packing.TreeRow())
        trees[-1].add(sample)
    packed = [tree.pack() for tree in trees]
    total = sum(len(one["token_index"]) for one in packed)
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)

    def run() -> None:
        for one in packed:
            there = {name: tensor.cuda() for name, tensor in one.items()}
            torch.autograd.backward(trl_loss(model, there, total))
        optimizer.step()
        optimizer.zero_grad()

    return Packing(run, sum(len(one["input_ids"]) for one in packed))


def trl_sample(row: Row) -> dict[str, Any]:
    """Return a row in the format of TRL's rollouts."""
    sampled = len(row.sampled_ids)
    before = row.size - sampled
    return {
        "input_ids": torch.tensor(row.ids),
        "completion_mask": torch.tensor([0] * before + [1] * sampled),
        "old_log_probs": torch.tensor([0.0] * before + list(row.sampled_logprobs)),
        "advantage": row.advantage,
        "group_id": 0,
    }


def trl_loss(model: Any, packed: dict[str, Tensor], total: int) -> Tensor:
    """Return the loss of `AsyncGRPOTrainer.compute_loss`, with its default clipping."""
    starts_q, starts_k = packed["tree_cu_seqlens_q"], packed["tree_cu_seqlens_k"]
    longest_q, longest_k = packed["tree_max_seqlens"].tolist()
    out = model(
        input_ids=packed["input_ids"][None],
        position_ids=packed["position_ids"][None],
        shift_labels=packed["shift_labels"][None],
        fused_lm_head=True,
        tree_kv_index=packed["tree_kv_index"],
        tree_cu_seqlens_q=starts_q,
        tree_cu_seqlens_k=starts_k,
        tree_max_seqlen_q=longest_q,
        tree_max_seqlen_k=longest_k,
    )
    ratio = (out.log_probs.flatten()[packed["token_index"]] - packed["old_log_probs"]).exp()
    worth = packed["advantages"]
    loss: Tensor = -torch.min(ratio * worth, ratio.clamp(0.8, 1.2) * worth).sum() / total
    return loss


def count_too_long(folder: Path, rows: Sequence[Row]) -> int:
    """Return how many of the episodes are too long to be trained beside a model server."""
    recipe = training_recipe()
    with hold_server_memory():
        learner = Learner(str(folder), recipe, seed=0, scratch=folder / "long")
        try:
            learner.update(rows)
        except Unusable as error:
            return len(error.episodes)
    return 0


@contextmanager
def hold_server_memory() -> Iterator[None]:
    """Allocate as much GPU memory as a model server takes."""
    if torch.cuda.is_available():
        share = int(torch.cuda.mem_get_info()[1] * SERVED)
        held = torch.empty(share, dtype=torch.uint8, device="cuda")
        yield
        del held
    else:
        yield


def bars(measured: Sequence[MeasuredUpdate], spent: int | None, *, counts: bool) -> list[Bar]:
    """Return the limits; without `counts`, as for a tiny model or a CPU, speed is not measured."""
    found = {one.name: one for one in measured}
    ours = found.get("tree") or found.get("chain")
    peak = peak_flops(torch.cuda.get_device_name()) if counts else None
    reached = faster = None
    if counts and ours is not None:
        reached = ours.flops / ours.seconds / peak if peak else None
        faster = found[TRL].seconds / ours.seconds if TRL in found else None
    return [
        Bar("MFU", reached, LEAST_MFU, at_least=True),
        Bar("times TRL's tokens/s", faster, 1.0, at_least=True),
        Bar(f"episodes of {LONG} tokens too long beside a server", spent, 0),
    ]


def updates_table(measured: Sequence[MeasuredUpdate], options: Any, context: int) -> Rows:
    heads = ["", "tokens/s", "MFU", "seconds", "tokens", "computed", "peak GiB"]
    on_gpu = torch.cuda.is_available()
    card = torch.cuda.get_device_name() if on_gpu else "a CPU"
    peak = peak_flops(card)
    lines = [
        [
            one.name,
            number(one.tokens / one.seconds),
            number(one.flops / one.seconds / peak, 3) if peak else "–",
            number(one.seconds, 1),
            number(one.tokens),
            number(one.computed),
            number(one.peak_gib, 1),
        ]
        for one in measured
    ]
    title = f"One update on {card}: episodes of {options.turns} calls up to {context} tokens"
    return Rows(title, heads, lines)


if __name__ == "__main__":
    main()
