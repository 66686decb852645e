"""Make adapters for a run beforehand, each by an optimiser step of the trainer's own learner.

So nothing is trained while the clients stream: a trainer has cores of its own, and it is the swap
that is measured.
"""

import time
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Final

import msgspec

from trainer.publishing.probe import ProbeRow

# One after the other in turn: a version must answer otherwise than the one before it.
ADAPTERS: Final = 2
PROBE: Final = "probe.json"


def prepare(model: str, recipe: str, folder: Path) -> float:
    """Write the adapters of `model` into `folder`, in a process of its own.

    Return the seconds that the trainer takes to compute what a probe should find (median), which a
    run does not count.
    """
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(_prepare, (model, recipe, folder))


def _prepare(model: str, recipe_name: str, folder: Path) -> float:
    from trainer.learners.learner import Learner
    from trainer.learners.model import Base
    from trainer.learners.probing import probe_rows
    from trainer.recipes.recipe import load_recipe

    recipe = load_recipe(recipe_name)
    base = Base(model, recipe)
    rows = probe_rows(base.tokenizer)
    took = []
    for number in range(ADAPTERS):
        learner = Learner(base, recipe, number, folder / "scratch")
        learner.rehearse()
        own = prepared(folder, number)
        own.mkdir(parents=True)
        learner.save(own)
        began = time.monotonic()
        logprobs = learner.logprobs(rows)
        took.append(time.monotonic() - began)
        probe = [
            ProbeRow(ids=row.ids, logprobs=tuple(told))
            for row, told in zip(rows, logprobs, strict=True)
        ]
        (own / PROBE).write_bytes(msgspec.json.encode(probe))
    return median(took)


def prepared(folder: Path, number: int) -> Path:
    """Return the folder of the adapter for load `number`."""
    return folder / str(number % ADAPTERS)


def probe_of(adapter: Path) -> tuple[ProbeRow, ...]:
    """Return what a probe of an adapter should find."""
    return msgspec.json.decode((adapter / PROBE).read_bytes(), type=tuple[ProbeRow, ...])
