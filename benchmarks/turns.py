"""Measure what it costs that several policies share one trainer.

For one policy and for three, in a process each: the memory that the trainer's learners take with
one base model, and how long it takes until the next policy can begin its update, whose adapter
and moments are read from their files. Beside that, what the other way would take: all adapters
and moments kept in memory, and switched by PEFT's `set_adapter`.
"""

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Final
from uuid import UUID

import torch
from peft import LoraConfig, get_peft_model

from store.values.distribution import Distribution
from trainer.batches.rows import Row
from trainer.learners.kernels.memory import give_freed_memory_back, keep_freed_memory
from trainer.learners.learner import Learner
from trainer.learners.model import Base, load_base
from trainer.recipes.recipe import load_recipe

COUNTS: Final = (1, 3)
ROUNDS: Final = 2
RANK: Final = 16


def main() -> None:
    """Measure each way in a fresh process, and print a JSON line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.turns")
    parser.add_argument("--model", help="folder or name of a model; default: the packaged one")
    model = parser.parse_args().model or _packaged()
    for way in (in_turn, all_resident):
        for count in COUNTS:
            found = _in_a_process(way, model, count)
            print(json.dumps({"way": way.__name__, "policies": count} | found), flush=True)


def _packaged() -> str:
    from pawl.stack.model import unpacked_model

    return str(unpacked_model(Path("var/models")))


def _in_a_process(way: Callable[[str, int], dict[str, float]], model: str, count: int) -> Any:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(way, (model, count))


def in_turn(model: str, count: int) -> dict[str, float]:
    """Train as the trainer does: the base carries the adapter of whose turn it is."""
    keep_freed_memory()
    recipe = load_recipe("default")
    base = Base(model, recipe)
    before = _memory()
    update_s, switch_s = [], []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        learners = [Learner(base, recipe, 0, root) for _ in range(count)]
        for number in range(ROUNDS + 1):
            for place, learner in enumerate(learners):
                started = time.perf_counter()
                learner.restore(root / str(place) / str(number) if number else None)
                if number:
                    switch_s.append(time.perf_counter() - started)
                update_s.append(_update(learner, root / str(place) / str(number + 1)))
        resident = _memory()
    return {
        "base_mib": before,
        "after_mib": resident,
        "until_the_update_begins_s": round(median(switch_s), 3),
        "update_of_256_tokens_s": round(median(update_s), 2),
    }


def _update(learner: Learner, folder: Path) -> float:
    started = time.perf_counter()
    learner.update(_rows())
    folder.mkdir(parents=True)
    learner.save(folder)
    learner.saved_as(folder)
    give_freed_memory_back()
    return time.perf_counter() - started


def all_resident(model: str, count: int) -> dict[str, float]:
    """Train the other way: every adapter and its moments in memory, switched by PEFT."""
    keep_freed_memory()
    base, _ = load_base(model, load_recipe("default"))
    before = _memory()
    config = LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(base, config, adapter_name="0")
    for name in range(1, count):
        adapted.add_adapter(str(name), config)
    optimizers: list[torch.optim.AdamW] = []
    switch_s = []
    for name in [*range(count)] * ROUNDS:
        started = time.perf_counter()
        adapted.set_adapter(str(name))
        switch_s.append(time.perf_counter() - started)
        trained = [p for p in adapted.parameters() if p.requires_grad]
        if len(optimizers) < count:
            optimizers.append(torch.optim.AdamW(trained))
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        optimizers[name].step()
        optimizers[name].zero_grad()
    give_freed_memory_back()
    return {
        "base_mib": before,
        "after_mib": _memory(),
        "until_the_update_begins_s": round(median(switch_s), 3),
    }


def _memory() -> float:
    """Return the memory of this process that is in use, in MiB."""
    give_freed_memory_back()
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in one)
    return round(int(line.split()[1]) / 1024, 1)


def _rows() -> list[Row]:
    dice = torch.Generator().manual_seed(0)
    ids = torch.randint(100, 10_000, (4, 64), generator=dice).tolist()
    return [
        Row(
            episode_id=UUID(int=number),
            agent="default",
            position=0,
            r_total=1.0,
            prompt_ids=tuple(own[:48]),
            sampled_ids=tuple(own[48:]),
            sampled_logprobs=(-9.0,) * 16,
            distribution=Distribution(temperature=1.0),
            advantage=1.0 if number % 2 else -1.0,
            weight=1 / 4,
            # Not the newest: nothing is said about drift.
            version=-1,
        )
        for number, own in enumerate(ids)
    ]


if __name__ == "__main__":
    main()
