"""Choose the size of micro-batches: the recipe's, or smaller if the GPU runs out of memory.

On a GPU shared with a model server the free memory is not known beforehand. A computation
that runs out of it is undone and repeated with micro-batches half as large; the smaller size
is kept for the rest of the run.
"""

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import structlog
import torch

from trainer.batches.micro_batches import plan_micro_batches
from trainer.batches.rows import Row
from trainer.errors import LearnerError

log = structlog.get_logger()

MicroBatches = list[list[Row]]
Result = TypeVar("Result")

# Below this a smaller micro-batch frees no memory worth having.
SMALLEST_BUDGET: Final = 64


class Budget:
    """Cut rows into micro-batches of at most `tokens` computed tokens each."""

    def __init__(self, tokens: int, *, merge: bool, alone: bool) -> None:
        """Start with `tokens` tokens; `alone` says that no other process computes in step."""
        self.tokens = tokens
        self._merge = merge
        self._alone = alone

    def cut(self, rows: Sequence[Row]) -> MicroBatches:
        """Cut `rows` into micro-batches."""
        return plan_micro_batches(rows, self.tokens, merge=self._merge)

    def fit(
        self, rows: Sequence[Row], run: Callable[[MicroBatches], Result], undo: Callable[[], None]
    ) -> tuple[Result, MicroBatches]:
        """Run `run` on micro-batches of `rows`, halving them as needed; return result and batches.

        `undo` is called after each attempt that ran out of memory.

        Raises:
            LearnerError: the smallest micro-batches do not fit either; or one of several processes
                ran out of memory, while the others wait for it in the middle of `run`.
        """
        while True:
            micro_batches = self.cut(rows)
            try:
                return run(micro_batches), micro_batches
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
