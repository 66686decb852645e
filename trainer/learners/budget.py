"""How much is computed at once: the recipe's tokens, or less where the GPU has no room for it.

On a GPU shared with a model server what is free is not known beforehand. Whatever runs out
of memory is undone and done again in micro-batches half as large; the smaller size stays.
"""

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import structlog
import torch

from trainer.batching import plan_micro_batches
from trainer.errors import LearnerError
from trainer.rows import Row

log = structlog.get_logger()

MicroBatches = list[list[Row]]
Result = TypeVar("Result")

# Below it is not the micro-batch that has no room.
SMALLEST_BUDGET: Final = 64


class Budget:
    """The micro-batches of a learner; `tokens` are computed at once, at most."""

    def __init__(self, tokens: int, *, merge: bool, alone: bool) -> None:
        """`alone`: no other process computes in step with this one."""
        self.tokens = tokens
        self._merge = merge
        self._alone = alone

    def plan(self, rows: Sequence[Row]) -> MicroBatches:
        """Cut `rows` into micro-batches."""
        return plan_micro_batches(rows, self.tokens, merge=self._merge)

    def fit(
        self, rows: Sequence[Row], run: Callable[[MicroBatches], Result], undo: Callable[[], None]
    ) -> tuple[Result, MicroBatches]:
        """Do `run` on micro-batches of `rows`, smaller ones if need be; and which they were.

        Raises:
            LearnerError: the smallest do not fit either; or, of several processes, one had no
                room: the others wait for it in the middle of the same run.
        """
        while True:
            plan = self.plan(rows)
            try:
                return run(plan), plan
            except torch.OutOfMemoryError as error:
                undo()
                self._shrink(error)

    def _shrink(self, error: torch.OutOfMemoryError) -> None:
        if not self._alone or self.tokens < 2 * SMALLEST_BUDGET:
            raise LearnerError(
                f"the GPU has no room for {self.tokens} tokens at once: lower"
                " batch.micro_batch_tokens, set batch.gradient_checkpointing, or give the model"
                f" server less (--gpu-memory-utilization): {error}"
            ) from error
        self.tokens //= 2
        torch.cuda.empty_cache()
        log.warning("micro_batches_made_smaller", tokens=self.tokens, reason=str(error)[:200])
