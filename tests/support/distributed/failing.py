"""Run by launched.py: at each meeting of an update in turn, one process fails instead of coming.

Arguments: MODEL FOLDER KIND, where KIND is what it fails with: "memory" or "fault".
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.support.training import recipe, rows
from trainer.errors import LearnerError
from trainer.learners.distributed import Leader, follow
from trainer.learners.learner import Learner
from trainer.learners.processes import FINE, Processes


class FailingProcesses(Processes):
    """Fail at one meeting of an update: the first in the first update, and so on.

    `left` are the meetings until then, None once it has failed or the update is over.
    """

    kind = ""
    updates = 0
    left: int | None = None

    def meet(self, own_state: int = FINE) -> None:
        if self.left is not None and own_state == FINE:
            self.left -= 1
            if not self.left:
                self.left = None
                if self.updates % self.count == self.rank:
                    raise ERRORS[self.kind]
        super().meet(own_state)


ERRORS = {"memory": torch.OutOfMemoryError("CUDA out of memory"), "fault": LearnerError("a fault")}


def main(arguments: Sequence[str]) -> None:
    model, folder, kind = arguments[0], Path(arguments[1]), arguments[2]
    made = Learner(model, recipe(micro_batch_tokens=256), seed=0, scratch=folder / "scratch")
    processes: Any = made.processes
    processes.__class__, processes.kind = FailingProcesses, kind
    update, is_over = made.update, [False]

    def update_and_fail(*arguments: Any) -> Any:
        processes.updates += 1
        processes.left = processes.updates
        try:
            return update(*arguments)
        finally:
            is_over[0] = processes.left is not None
            processes.left = None

    update_and_fail.__name__ = "update"
    made.update = update_and_fail  # type: ignore[method-assign]
    if processes.rank > 0:
        follow({"a": made})
        return
    leader = Leader({"a": made})
    led = leader.learners["a"]
    outcomes: list[tuple[str, float]] = []
    while not is_over[0]:
        led.restore(None)
        began = time.monotonic()
        try:
            led.update(rows(0))
            outcome = "trained"
        except LearnerError as error:
            outcome = str(error)
        outcomes.append((outcome, time.monotonic() - began))
    led.save(folder)
    (folder / "outcomes.json").write_text(json.dumps(outcomes))
    leader.stop_followers()
