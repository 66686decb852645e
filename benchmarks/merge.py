"""Compare merged prefixes with separate rows and TRL's GRPO: gradients, tokens and time.

Gradients are compared in float64 over random trees of a tiny model, and in float32 with
SmolLM2-135M (the packaged one, or `--model`) and LoRA of rank 16 on all linear layers, also with
transformers' and PEFT's own layers. One update, of 16 groups of 8 with a shared prompt, and of a
thread of 20 turns, is timed against TRL's own loss over padded rows. Ends with status 1 if a bar is
missed; `--quick` uses a tiny random model and a few rows, and judges only the gradients.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.report import Bar, Rows, bars_table, plotting
from benchmarks.stack import ROOT
from pawl.stack.model import unpacked_model
from tests.support.trainer.merging import (
    CAP,
    TINY,
    cut_ids,
    gradient,
    largest_difference,
    make_model,
    make_row,
    random_tree,
    random_words,
    train,
    weighted,
    worth_of,
)
from trainer.batches import Row, computed_tokens, plan_micro_batches
from trainer.learners.kernels.process import keep_freed_memory


class Size(NamedTuple):
    """How many groups, their members and turns of a thread; prompt, reply and turn in tokens."""

    groups: int = 16
    members: int = 8
    prompt: int = 130
    sampled: int = 22
    turns: int = 20
    turn: int = 50


PICTURE: Final = ROOT / "docs" / "images" / "merge.png"
QUICK: Final = Size(groups=2, members=4, prompt=24, sampled=6, turns=4, turn=12)
# Tokens of a micro-batch, and the number of random trees.
BUDGET: Final = 2048
SEEDS: Final = 50
# TRL computes at most TRL_ROWS rows at once, its default, with TRL_TOKENS tokens in all: eight of a
# thread's last turns would take more than 20 GB, most of it logits.
TRL_ROWS, TRL_TOKENS = 8, 2400
# The bars: how many times fewer tokens than TRL an update computes, and how many times faster.
BARS: Final = {"groups": (4.0, 2.8), "thread": (10.0, 8.0)}
Result = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.merge", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=Path, help="a folder; left out: the packaged SmolLM2")
    parser.add_argument("--quick", action="store_true", help="tiny model, few rows")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--write", action="store_true", help=f"draw {PICTURE.name}")
    options = parser.parse_args()
    console = Console()
    keep_freed_memory()
    if options.quick:
        torch.set_num_threads(1)
        result = measure(TINY, random_words(TINY.vocab_size), QUICK, options.repeats)
    else:
        model = options.model or unpacked_model(ROOT / "var" / "models")
        result = measure(model, document_ids(model), Size(), options.repeats)
    promises = bars(result, quick=options.quick)
    for table in (updates_table(result), bars_table(promises)):
        console.print(table.rich())
    if options.write:
        draw(result)
    sys.exit(0 if all(bar.holds for bar in promises) else 1)


def document_ids(model: Path) -> list[int]:
    """Return the token ids of this repository's documents."""
    from transformers import AutoTokenizer

    pages = [ROOT / "ARCHITECTURE.md", ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = "\n".join(page.read_text() for page in pages)
    ids: list[int] = AutoTokenizer.from_pretrained(model)(text, verbose=False)["input_ids"]
    return ids


def measure(source: Any, words: Sequence[int], size: Size, repeats: int) -> Result:
    shared, turns = make_groups(size, words), make_conversation(size, words)
    few = shared[: size.members] + turns[:3]
    return {
        "tiny": tiny_gradients(),
        "gradient": real_gradient(source, few),
        "groups": compare_with_trl(source, shared, repeats),
        "thread": compare_with_trl(source, turns, repeats),
        "half": bf16_cosine(source, few),
    }


def make_groups(size: Size, words: Sequence[int]) -> list[Row]:
    """Make `groups` × `members` rows; a group has one prompt of about `prompt` tokens."""
    dice = random.Random(0)
    rows = []
    for _ in range(size.groups):
        prompt = cut_ids(dice, words, size.prompt + dice.randint(-8, 8))
        for _ in range(size.members):
            length = size.sampled + dice.randint(-size.sampled // 4, size.sampled // 4)
            rows.append(make_row(dice, prompt, cut_ids(dice, words, length)))
    return weighted(rows)


def make_conversation(size: Size, words: Sequence[int]) -> list[Row]:
    """Make one conversation: each turn's prompt is everything before the turn."""
    dice = random.Random(1)
    rows = []
    conversation = cut_ids(dice, words, size.prompt)
    for _ in range(size.turns):
        sampled = cut_ids(dice, words, size.sampled)
        rows.append(make_row(dice, conversation, sampled))
        conversation = conversation + sampled + cut_ids(dice, words, size.turn - size.sampled)
    return weighted(rows)


def tiny_gradients() -> float:
    """Return the largest difference of merged and separate gradients, in float64, random trees."""
    model = make_model(TINY, torch.float64)
    reference = make_model(TINY, torch.float64, lean=False)
    worst = 0.0
    for seed in range(SEEDS):
        rows = random_tree(seed, TINY.vocab_size)
        train(model, [rows], layout="tree")
        train(reference, [rows], layout="whole")
        worst = max(worst, largest_difference(gradient(model), gradient(reference)))
    return worst


def real_gradient(source: Any, rows: Sequence[Row]) -> Result:
    """Compare the merged gradient in float32 with the separate one, and with stock layers'."""
    model = make_model(source, torch.float32)
    train(model, plan_micro_batches(rows, BUDGET, layout="tree"), layout="tree")
    merged = gradient(model)
    train(model, [[row] for row in rows], layout="whole")
    separate = gradient(model)
    reference = make_model(source, torch.float32, lean=False)
    train(reference, [[row] for row in rows], layout="whole")
    stock = gradient(reference)
    return {
        "from_separate": largest_difference(merged, separate),
        "from_stock_layers": largest_difference(merged, stock),
        "cosine": float(torch.cosine_similarity(merged, stock, dim=0)),
    }


def compare_with_trl(source: Any, rows: Sequence[Row], repeats: int) -> Result:
    """Compare one update with TRL's: tokens, and seconds (best of `repeats` after a warm-up)."""
    model = make_model(source, torch.float32)
    batches = plan_micro_batches(rows, BUDGET, layout="tree")
    train(model, batches[:1], layout="tree")
    taken = best_seconds(model, lambda: train(model, batches, layout="tree"), repeats)
    merged = gradient(model)
    reference = make_model(source, torch.float32, lean=False)
    trl_update(reference, rows[:2])[0]()
    run, trl_tokens = trl_update(reference, rows)
    trl_taken = best_seconds(reference, run, repeats)
    tokens = sum(computed_tokens(batch) for batch in batches)
    return {
        "rows": len(rows),
        "tokens": tokens,
        "trl_tokens": trl_tokens,
        "fewer_tokens": trl_tokens / tokens,
        "seconds": taken,
        "trl_seconds": trl_taken,
        "faster": trl_taken / taken,
        "largest_difference": largest_difference(merged, gradient(reference)),
    }


def trl_update(model: Any, rows: Sequence[Row]) -> tuple[Callable[[], None], int]:
    """Return a function that runs TRL's GRPO loss (cispo) over padded rows, and its tokens."""
    trainer = _trl_trainer(model)
    at_once = max(1, min(TRL_ROWS, TRL_TOKENS // max(row.size for row in rows)))
    batches = [_padded(rows[start : start + at_once]) for start in range(0, len(rows), at_once)]

    def run() -> None:
        for batch in batches:
            trainer._compute_loss(trainer.model, batch).backward()

    return run, sum(
        batch["prompt_ids"].numel() + batch["completion_ids"].numel() for batch in batches
    )


def _trl_trainer(model: Any) -> Any:
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
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
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
    )
    # TRL requires a tokenizer, but tokenises nothing here.
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    trainer = GRPOTrainer(
        model=model,
        args=config,
        reward_funcs=lambda **_: [],
        train_dataset=Dataset.from_dict({"prompt": [""] * 4}),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=words, eos_token="b", pad_token="b"
        ),
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def _padded(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Return TRL's tensors: prompts padded on the left, completions on the right."""

    def pad(values: Sequence[Sequence[float]], side: str) -> Tensor:
        tensors = [torch.tensor(row) for row in values]
        padded: Tensor = torch.nn.utils.rnn.pad_sequence(
            tensors, batch_first=True, padding_side=side
        )
        return padded

    worth = torch.tensor([worth_of(row) for row in rows])
    return {
        "prompt_ids": pad([row.prompt_ids for row in rows], "left"),
        "prompt_mask": pad([[1] * len(row.prompt_ids) for row in rows], "left"),
        "completion_ids": pad([row.sampled_ids for row in rows], "right"),
        "completion_mask": pad([[1] * len(row.sampled_ids) for row in rows], "right"),
        "old_per_token_logps": pad([row.sampled_logprobs for row in rows], "right"),
        "advantages": worth[:, None].expand(-1, max(len(row.sampled_ids) for row in rows)),
        "num_items_in_batch": torch.tensor(1.0),
    }


def best_seconds(model: Any, update: Callable[[], object], repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        model.zero_grad(set_to_none=True)
        started = time.perf_counter()
        update()
        taken.append(time.perf_counter() - started)
    return min(taken)


def bf16_cosine(source: Any, rows: Sequence[Row]) -> float:
    """Return the cosine of the gradients in bf16 and float32."""
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        model = make_model(source, dtype)
        train(model, plan_micro_batches(rows, BUDGET, layout="tree"), layout="tree")
        gradients.append(gradient(model))
    return float(torch.cosine_similarity(gradients[0], gradients[1], dim=0))


def bars(result: Result, *, quick: bool) -> list[Bar]:
    differences = [
        Bar("float64, random trees: largest difference x 1e6", result["tiny"] * 1e6, 1),
        Bar("float32: largest difference x 1e5", result["gradient"]["from_separate"] * 1e5, 1),
        Bar("bf16 against float32: cosine", result["half"], 0.99, at_least=True),
    ]
    if quick:
        return differences
    return differences + [
        bar
        for name, (fewer, faster) in BARS.items()
        for bar in (
            Bar(f"{name}: times fewer tokens", result[name]["fewer_tokens"], fewer, at_least=True),
            Bar(f"{name}: times faster", result[name]["faster"], faster, at_least=True),
        )
    ]


def updates_table(result: Result) -> Rows:
    heads = ["one update", "tokens", "TRL's", "fewer", "seconds", "TRL's", "faster"]
    heads += ["gradients differ by"]
    lines = [
        [
            f"{name}, {row['rows']} rows",
            f"{row['tokens']}",
            f"{row['trl_tokens']}",
            f"{row['fewer_tokens']:.1f}x",
            f"{row['seconds']:.2f}",
            f"{row['trl_seconds']:.2f}",
            f"{row['faster']:.1f}x",
            f"{row['largest_difference']:.1e}",
        ]
        for name, row in result.items()
        if name in BARS
    ]
    stock = result["gradient"]["from_stock_layers"]
    note = f"Against transformers' and PEFT's own layers, float32: largest difference {stock:.1e}."
    return Rows("Merged against TRL's GRPO", heads, lines, [note])


def draw(result: Result) -> None:
    """Draw tokens and seconds of one update, merged and TRL's."""
    figure, axes = plotting().subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    for axis, key, form in zip(axes, ("tokens", "seconds"), ("{:,.0f}", "{:.1f}"), strict=True):
        for offset, prefix, label in ((-0.2, "trl_", "TRL's GRPO"), (0.2, "", "merged")):
            places = [index + offset for index in range(len(BARS))]
            drawn = axis.bar(
                places, [result[name][prefix + key] for name in BARS], 0.38, label=label
            )
            axis.bar_label(drawn, fmt=form, fontsize=8)
        axis.set_xticks(range(len(BARS)), ["16 groups of 8", "a thread of 20 turns"])
        axis.set_title(f"one update: {key}", fontsize=10)
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(PICTURE, dpi=140)


if __name__ == "__main__":
    main()
