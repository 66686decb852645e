"""Make the tables, and the picture in docs/."""

from pathlib import Path
from typing import Any

from rich.table import Table

Result = dict[str, Any]

BARS = {"groups": (4.0, 2.8), "thread": (10.0, 8.0)}


def tables(result: Result) -> list[Table]:
    """Show what was measured on a CPU, beside what it should be."""
    return [_gradients(result), _against_trl(result), _updates(result["updates"])]


def _gradients(result: Result) -> Table:
    table = Table("gradient, merged against separate", "largest difference", "bar")
    tiny, real, half = result["tiny"], result["gradient"], result["half"]
    table.add_row(
        f"float64, tiny, {tiny['trees']} random trees", f"{tiny['largest_difference']:.1e}", "1e-6"
    )
    table.add_row(f"float32, {real['rows']} rows", f"{real['largest_difference']:.1e}", "1e-5")
    stock = f"float32, merged against transformers' and PEFT's own layers, {real['rows']} rows"
    table.add_row(stock, f"{real['from_stock_layers']:.1e}", "")
    table.caption = f"bf16 against float32, merged: cosine {half['cosine']:.4f}"
    return table


def _against_trl(result: Result) -> Table:
    table = Table(
        "one update", "tokens", "TRL's", "fewer", "bar", "seconds", "TRL's", "faster", "bar"
    )
    for name, (fewer, faster) in BARS.items():
        row = result[name]
        table.add_row(
            f"{name}, {row['rows']} rows",
            f"{row['tokens']}",
            f"{row['trl_tokens']}",
            f"{row['fewer_tokens']:.1f}x",
            f"{fewer:g}x",
            f"{row['seconds']:.2f}",
            f"{row['trl_seconds']:.2f}",
            f"{row['faster']:.1f}x",
            f"{faster:g}x",
        )
    return table


def _updates(updates: list[Result]) -> Table:
    table = Table(
        "update", "seconds", "row tokens/s", "GFLOP/s", "peak", "share", "torch.mm", "share"
    )
    for row in updates:
        names = [row.get("model"), row.get("case"), row["dtype"]]
        kind = "merged" if row["merged"] else "separate"
        table.add_row(
            ", ".join([name for name in names if name] + [kind]),
            f"{row['seconds']:.2f}",
            f"{row['row_tokens_per_s']:.0f}",
            f"{row['gflops']:.0f}",
            f"{row['peak_gflops']:.0f}",
            f"{row['share_of_peak']:.0%}",
            f"{row['mm_gflops']:.0f}",
            f"{row['share_of_mm']:.0%}",
        )
    return table


def gpu_table(result: Result) -> Table:
    """Show what was measured on a GPU."""
    table = _updates(result["updates"])
    table.title = f"{result['device']}, torch {result['torch']}"
    return table


def draw(result: Result, path: Path) -> None:
    """Draw tokens and seconds of one update, ours and TRL's."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    names = list(BARS)
    for axis, key, title in zip(
        axes, ("tokens", "seconds"), ("tokens computed", "seconds"), strict=True
    ):
        for offset, prefix, label in ((-0.2, "trl_", "TRL's GRPO"), (0.2, "", "merged")):
            places = [index + offset for index in range(len(names))]
            values = [result[name][prefix + key] for name in names]
            bars = axis.bar(places, values, 0.38, label=label)
            axis.bar_label(bars, fmt="{:,.0f}" if key == "tokens" else "{:.1f}", fontsize=8)
        axis.set_xticks(range(len(names)), ["16 groups of 8", "a thread of 20 turns"])
        axis.set_title(f"one update: {title}", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=140)
