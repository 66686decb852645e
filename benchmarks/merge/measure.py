"""Measure gradients, time against TRL, and the share of the peak, each as a plain dictionary."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.merge.episodes import Size, groups, random_tree, random_words, thread
from benchmarks.merge.models import TINY, make_model
from benchmarks.merge.updates import gradient, largest_difference, plan, train, trl_update
from benchmarks.merge.work import needed_flops, peaks, seconds
from trainer.batches.micro_batches import computed_tokens
from trainer.batches.rows import Row

Say = Callable[[str], None]
Result = dict[str, Any]


def tiny_gradients(seeds: int) -> Result:
    """Compare merged with separate in float64 on random trees: the most they differ by."""
    model = make_model(TINY, torch.float64)
    reference = make_model(TINY, torch.float64, lean=False)
    worst = 0.0
    for seed in range(seeds):
        rows = random_tree(seed, TINY.vocab_size)
        train(model, [rows], merge=True)
        train(reference, [rows], merge=False)
        worst = max(worst, largest_difference(gradient(model), gradient(reference)))
    return {"trees": seeds, "largest_difference": worst}


def real_gradient(source: Any, rows: Sequence[Row], budget: int) -> Result:
    """Compare merged in float32 with separate, and with transformers' and PEFT's own layers."""
    model = make_model(source, torch.float32)
    train(model, plan(rows, budget), merge=True)
    merged = gradient(model)
    train(model, [[row] for row in rows], merge=False)
    separate = gradient(model)
    reference = make_model(source, torch.float32, lean=False)
    train(reference, [[row] for row in rows], merge=False)
    stock = gradient(reference)
    return {
        "rows": len(rows),
        "largest_difference": largest_difference(merged, separate),
        "from_stock_layers": largest_difference(merged, stock),
        "separate_from_stock_layers": largest_difference(separate, stock),
        "cosine": float(torch.cosine_similarity(merged, stock, dim=0)),
    }


def against_trl(
    source: Any, rows: Sequence[Row], budget: int, repeats: int, say: Say = lambda _: None
) -> Result:
    """Measure one update against TRL's: tokens, and seconds (best of `repeats`, once warm)."""
    taken, tokens, merged = _ours(source, rows, budget, repeats, say)
    trl_taken, trl_tokens, theirs = _trls(source, rows, repeats, say)
    return {
        "rows": len(rows),
        "tokens": tokens,
        "trl_tokens": trl_tokens,
        "fewer_tokens": trl_tokens / tokens,
        "seconds": taken,
        "trl_seconds": trl_taken,
        "faster": trl_taken / taken,
        "largest_difference": largest_difference(merged, theirs),
    }


Taken = tuple[float, int, torch.Tensor]


def _ours(source: Any, rows: Sequence[Row], budget: int, repeats: int, say: Say) -> Taken:
    model = make_model(source, torch.float32)
    batches = plan(rows, budget)
    train(model, batches[:1], merge=True)
    taken = []
    for _ in range(repeats):
        model.zero_grad(set_to_none=True)
        say("merged")
        taken.append(seconds(lambda: train(model, batches, merge=True)))
    return min(taken), sum(computed_tokens(batch) for batch in batches), gradient(model)


def _trls(source: Any, rows: Sequence[Row], repeats: int, say: Say) -> Taken:
    model = make_model(source, torch.float32, lean=False)
    warm, _ = trl_update(model, rows[:2])
    warm()
    run, tokens = trl_update(model, rows)
    taken = []
    for _ in range(repeats):
        model.zero_grad(set_to_none=True)
        say("TRL")
        taken.append(seconds(run))
    return min(taken), tokens, gradient(model)


def share_of_peak(
    source: Any,
    rows: Sequence[Row],
    budget: int,
    repeats: int,
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    merge: bool = True,
    quick: bool = False,
) -> Result:
    """Measure a whole update (forward, backward, clipped AdamW step) against the machine's best."""
    model = make_model(source, dtype, device)
    batches = plan(rows, budget, merge=merge)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0)

    def update() -> None:
        train(model, batches, merge=merge)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    update()
    before = peaks(dtype, device, quick=quick)
    taken = [seconds(update) for _ in range(repeats)]
    after = peaks(dtype, device, quick=quick)
    flops, best = needed_flops(model, batches, merge=merge), min(taken)
    peak = {name: max(before[name], after[name]) for name in before}
    return {
        "dtype": str(dtype)[6:],
        "merged": merge,
        "tokens": sum(computed_tokens(batch, merge=merge) for batch in batches),
        "row_tokens": sum(len(row.ids) for row in rows),
        "seconds": best,
        "row_tokens_per_s": sum(len(row.ids) for row in rows) / best,
        "gflops": flops / best / 1e9,
        "peak_gflops": peak["best"] / 1e9,
        "mm_gflops": peak["mm"] / 1e9,
        "share_of_peak": flops / best / peak["best"],
        "share_of_mm": flops / best / peak["mm"],
    }


def half_precision(source: Any, rows: Sequence[Row], budget: int) -> Result:
    """Compare the gradient in bf16 with float32's."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model = make_model(source, dtype)
        train(model, plan(rows, budget), merge=True)
        found.append(gradient(model))
    return {
        "cosine": float(torch.cosine_similarity(found[0], found[1], dim=0)),
        "norm_ratio": float(found[1].norm() / found[0].norm()),
    }


def everything(
    source: Path | Any, words: Sequence[int], size: Size, options: Any, say: Say
) -> Result:
    """Measure all of it, on a CPU."""
    shared, turns = groups(size, words), thread(size, words)
    budget, repeats = options.budget, options.repeats
    say("gradients, random trees")
    result: Result = {"tiny": tiny_gradients(options.seeds)}
    say("gradient, real weights")
    few = shared[: size.members] + turns[:3]
    result["gradient"] = real_gradient(source, few, budget)
    result["groups"] = against_trl(source, shared, budget, repeats, lambda s: say(f"groups, {s}"))
    result["thread"] = against_trl(source, turns, budget, repeats, lambda s: say(f"thread, {s}"))
    result["updates"] = []
    for dtype in (torch.float32, torch.bfloat16):
        say(f"peak, {str(dtype)[6:]}")
        measured = share_of_peak(source, shared, budget, repeats, dtype, quick=options.quick)
        result["updates"].append(measured)
    say("gradient, bf16")
    result["half"] = half_precision(source, few, budget)
    return result


def on_gpu(sources: dict[str, Any], size: Size, options: Any, say: Say) -> Result:
    """Measure tokens a second and share of the peak in bf16, merged and not."""
    cases = {"groups": groups, "thread": thread}
    found = []
    for name, case, merge in itertools.product(sources, cases, (True, False)):
        config = sources[name]
        say(f"{name}, {case}, {'merged' if merge else 'separate'}")
        measured = share_of_peak(
            config,
            cases[case](size, random_words(config.vocab_size)),
            options.budget,
            options.repeats,
            torch.bfloat16,
            "cuda",
            merge=merge,
        )
        found.append({"model": name, "case": case} | measured)
    return {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "updates": found}
