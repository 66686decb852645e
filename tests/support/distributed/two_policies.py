"""Run by launched.py, in two processes: two policies, of which one has no room once.

Arguments: MODEL FOLDER
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.support.training import recipe, rows
from trainer.errors import ShortOfMemory
from trainer.learners.distributed import Leader, follow
from trainer.learners.learner import Learner
from trainer.learners.model import Base


def main(arguments: Sequence[str]) -> None:
    model, folder = arguments[0], Path(arguments[1])
    base = Base(model, recipe(steps=2))
    learners = {
        name: Learner(base, recipe(steps=2), seed=0, scratch=folder / "scratch") for name in "ab"
    }
    if base.processes.rank > 0:
        have_no_room_once(base, learners["a"])
        follow(learners)
        return
    leader = Leader(learners)
    try:
        leader.learners["a"].restore(None)
    except ShortOfMemory as error:
        (folder / "told").write_text(str(error))
    for name in "ba":
        led = leader.learners[name]
        led.restore(None)
        led.update(rows(0))
        saved = folder / name
        saved.mkdir()
        led.save(saved)
    leader.stop_followers()


def have_no_room_once(base: Base, learner: Learner) -> None:
    real = base.attach

    def attach(holder: Any, *arguments: Any) -> Any:
        attached = real(holder, *arguments)
        if holder is learner:
            base.attach = real
            raise torch.OutOfMemoryError("CUDA out of memory")
        return attached

    base.attach = attach
