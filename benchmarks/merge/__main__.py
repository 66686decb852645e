"""Compare merged prefixes with separate rows and TRL's GRPO: gradients, tokens, time, the peak.

    python -m benchmarks.merge [--quick] [--model DIR] [--write] [--json]
    python -m benchmarks.merge --device cuda [--json]

Measured with SmolLM2-135M (the packaged one, or --model) in float32 with LoRA r16 on all
linear layers; --quick takes a tiny random model and a few rows. On a GPU: random weights of
SmolLM2's shape and of a billion parameters, in bf16; the weights are not needed.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.merge.episodes import FULL, QUICK, random_words
from benchmarks.merge.measure import everything, on_gpu
from benchmarks.merge.models import BILLION, SMALL, TINY
from benchmarks.merge.tables import draw, gpu_table, tables
from trainer.learners.kernels.memory import keep_freed_memory

PICTURE = Path("docs/images/merge.png")


def main() -> None:
    options = _parse(sys.argv[1:])
    console = Console(stderr=options.json)
    torch.set_num_threads(options.threads or torch.get_num_threads())
    keep_freed_memory()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("loading")
        result = _measure(options, lambda what: progress.update(task, description=what))
    for table in [gpu_table(result)] if options.device == "cuda" else tables(result):
        console.print(table)
    if options.write:
        draw(result, PICTURE)
    if options.json:
        print(json.dumps(result))


def _measure(options: argparse.Namespace, say: Any) -> dict[str, Any]:
    size = QUICK if options.quick else FULL
    if options.device == "cuda":
        return on_gpu({"SmolLM2's shape": SMALL, "1B": BILLION}, size, options, say)
    if options.quick:
        return everything(TINY, random_words(TINY.vocab_size), size, options, say)
    model = options.model or _packaged()
    return everything(model, _text(model), size, options, say)


def _text(model: Path) -> list[int]:
    """Return this repository's own documents, as the model reads them."""
    from transformers import AutoTokenizer

    documents = [Path("ARCHITECTURE.md"), Path("README.md"), *sorted(Path("docs").glob("*.md"))]
    text = "\n".join(path.read_text() for path in documents)
    ids: list[int] = AutoTokenizer.from_pretrained(model)(text, verbose=False)["input_ids"]
    return ids


def _packaged() -> Path:
    from pawl.stack.model import unpacked_model

    return unpacked_model(Path("var/models"))


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.merge", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=Path, help="a folder; left out: the packaged SmolLM2")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="tiny model, few rows")
    parser.add_argument("--budget", type=int, help="tokens of a micro-batch")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=50, help="random trees")
    parser.add_argument("--threads", type=int, help="of torch; left out: as many as it takes")
    parser.add_argument("--write", action="store_true", help=f"draw {PICTURE}")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args(arguments)
    options.budget = options.budget or (16384 if options.device == "cuda" else 2048)
    return options


if __name__ == "__main__":
    main()
