"""Fit an update into memory: checkpoint activations, then cut micro-batches smaller.

On a GPU shared with a model server the free memory changes. A computation that runs out of it is
undone and repeated: first with gradient checkpointing, if the recipe leaves that open, then with
micro-batches half as large. Later updates try the full size again, so that a moment of too little
memory does not slow the trainer for good.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import Final, TypeVar

import structlog
import torch

from trainer.batches import Layout, Row, RowKey, chains_of, computed_tokens, plan_micro_batches
from trainer.errors import (
    LONG_CALL_REMEDY,
    MEMORY_REMEDY,
    TOO_LONG,
    CompanionFailed,
    ShortOfMemory,
    Unusable,
)
from trainer.learners.processes import NO_MEMORY, Processes

log = structlog.get_logger()

MicroBatches = list[list[Row]]
Result = TypeVar("Result")

# In tokens: making micro-batches smaller than this would save hardly any memory.
SMALLEST_BUDGET: Final = 64
# The most updates between two attempts at full micro-batches.
LONGEST_WAIT: Final = 64
# torch's message about a CPU's memory, for which it has no exception class.
NO_CPU_MEMORY: Final = "can't allocate memory"
# CUDA's message outside torch's allocator, in an `AcceleratorError`, not an `OutOfMemoryError`.
NO_DEVICE_MEMORY: Final = "CUDA error: out of memory"


class MemoryRanOut(Exception):
    """Report that memory ran out in computing `rows`; `TokenBudget.run_fitting` handles it.

    `rows` is empty if memory ran out only in another process.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        super().__init__(f"no memory for {len(rows)} rows")
        self.rows = rows


@contextmanager
def catch_out_of_memory(rows: Sequence[Row], processes: Processes) -> Iterator[None]:
    """Raise `MemoryRanOut` in all processes if the block runs out of memory in any of them.

    All processes run equally many blocks, and meet at the end of each: a process may run out of
    memory after the last meeting within a block, and with a packed base there is none within it.

    Raises:
        CompanionFailed: another process failed for another reason.
    """
    try:
        yield
        processes.meet()
    except CompanionFailed as error:
        if not error.is_memory:
            raise
        processes.recover()
        raise MemoryRanOut([]) from error
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        processes.meet(NO_MEMORY)
        processes.recover()
        raise MemoryRanOut(rows) from error


@contextmanager
def report_short_memory(doing: str) -> Iterator[None]:
    """Raise `ShortOfMemory` if the block, which cannot be cut smaller, runs out of memory.

    `doing` completes "memory ran out …" in the error's message.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        torch.cuda.empty_cache()
        raise ShortOfMemory(f"memory ran out {doing}: {MEMORY_REMEDY}: {error}") from error


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error of torch means that the memory of a GPU or of the CPU ran out."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return any(words in str(error) for words in (NO_CPU_MEMORY, NO_DEVICE_MEMORY))


def too_long_error(rows: Sequence[Row]) -> Unusable:
    """Return the error for rows that do not fit into memory, even one by one."""
    shortest = min(row.size for row in rows)
    return Unusable(
        f"a call of {shortest} tokens does not fit into the trainer's memory by itself: its episode"
        f" is not trained; to train such calls, {LONG_CALL_REMEDY}",
        {
            row.episode_id: f"a call of {row.size} tokens does not fit into the memory by itself"
            for row in rows
        },
        reason=TOO_LONG,
    )


def _row_size(row: Row) -> int:
    return row.size


class TokenBudget:
    """Cut rows into micro-batches that fit into memory, and retry with less if it runs out.

    A micro-batch computes up to about `tokens` tokens, or one longer row. When memory runs out, all
    layers are checkpointed, if the recipe leaves that open, then `tokens` is halved, again and
    again. The next update undoes both; after more failures only every second, fourth … one does.
    """

    def __init__(
        self,
        tokens: int,
        *,
        layout: Layout,
        processes: Processes,
        checkpoint: Callable[[float], None] | None = None,
    ) -> None:
        """Start with `tokens` tokens, and without checkpointing if the recipe leaves it open.

        Args:
            tokens: the recipe's size of micro-batches.
            layout: how rows are computed.
            processes: the processes that compute together, each with an equal budget.
            checkpoint: checkpoints a share of the layers; None if the recipe fixes checkpointing.
        """
        self.tokens = tokens
        self.checkpointed_share = 0.0
        self._most_tokens = inf
        self._planned_tokens = 0
        self._checkpoint = checkpoint
        self._full_tokens = tokens
        self._layout = layout
        self._processes = processes
        # Updates since memory ran out, and how many must pass before the full size is retried.
        self._updates_since_failure = 0
        self._updates_to_wait = 1
        self._is_retrying = False
        # Tokens of the longest row that was ever trained on.
        self.longest = 0

    def begin_update(
        self, least_checkpointed: float = 0.0, most_tokens: float = inf, planned_tokens: int = 0
    ) -> None:
        """Begin an update, with full micro-batches unless these failed in a recent update.

        After each failure, twice as many updates pass before the next attempt.

        Args:
            least_checkpointed: the share of the layers to checkpoint, at least.
            most_tokens: the most tokens of a micro-batch.
            planned_tokens: tokens that should fit at once; larger micro-batches up to this size are
                made where they save repeating prefixes.
        """
        self._most_tokens = most_tokens
        self._planned_tokens = planned_tokens
        self._updates_since_failure += 1
        is_reduced = self.tokens < self._full_tokens or self.checkpointed_share > least_checkpointed
        self._is_retrying = is_reduced and self._updates_since_failure >= self._updates_to_wait
        if not is_reduced:
            self._updates_to_wait = 1
        elif self._is_retrying:
            self.tokens, self._updates_since_failure = self._full_tokens, 0
        kept = 0.0 if self._is_retrying else self.checkpointed_share
        self._set_checkpointed(max(kept, least_checkpointed))

    def _set_checkpointed(self, share: float) -> None:
        if self._checkpoint is not None and share != self.checkpointed_share:
            self._checkpoint(share)
            self.checkpointed_share = share

    def halve_micro_batches(self, halvings: int) -> None:
        """Checkpoint all layers and halve full micro-batches `halvings` times, for some updates."""
        self.tokens = max(SMALLEST_BUDGET, self._full_tokens >> halvings)
        self._set_checkpointed(1.0)
        self._updates_since_failure, self._updates_to_wait = 0, LONGEST_WAIT

    def cut(self, rows: Sequence[Row]) -> MicroBatches:
        """Cut `rows` into micro-batches.

        With several processes each micro-batch is one forward pass: they gather each sharded layer
        together, and so must run equally many passes.
        """
        if self._processes.count > 1 and self._layout != "tree":
            return chains_of(rows, self._layout)
        planned = self._planned_tokens if self.tokens == self._full_tokens else 0
        budget = int(min(self.tokens, self._most_tokens))
        return plan_micro_batches(rows, budget, layout=self._layout, most=planned)

    def run_fitting(
        self,
        rows: Sequence[Row],
        run: Callable[[MicroBatches], Result],
        undo: Callable[[], None],
        fits: Callable[[Row], bool],
        *,
        trains: bool = True,
    ) -> tuple[Result, MicroBatches]:
        """Call `run` with `rows` cut into micro-batches, until an attempt fits into memory.

        After an attempt that ran out of memory the next one takes less: first all layers are
        checkpointed, if the recipe leaves that open, then the micro-batches are halved, again and
        again.

        Args:
            rows: the rows to compute.
            run: computes micro-batches; raises `MemoryRanOut`.
            undo: undoes an attempt that ran out of memory; called before the next attempt.
            fits: returns whether `run` has memory for one row by itself.
            trains: whether `run` has a backward pass. Without one, checkpointing saves nothing and
                is left out, and a success does not prove that a row can be trained on.

        Returns:
            The result of `run`, and the micro-batches of the attempt that succeeded.

        Raises:
            Unusable: some rows do not fit even by themselves, while others do.
            ShortOfMemory: the smallest micro-batches do not fit, and no row is to blame.
        """
        while True:
            micro_batches = self.cut(rows)
            try:
                result = run(micro_batches)
            except MemoryRanOut as error:
                failed, reason = error.rows, str(error.__cause__)
            else:
                if trains:
                    self.longest = max([self.longest, *(row.size for row in rows)])
                return result, micro_batches
            # Only here is the error freed, and with it the tensors of the failed pass.
            undo()
            self._take_less_memory(failed, reason, rows, fits, trains=trains)

    def _take_less_memory(
        self,
        failed: Sequence[Row],
        reason: str,
        rows: Sequence[Row],
        fits: Callable[[Row], bool],
        *,
        trains: bool,
    ) -> None:
        """Checkpoint all layers or halve micro-batches, after memory ran out at `failed` rows."""
        torch.cuda.empty_cache()
        if trains and self._checkpoint is not None and self.checkpointed_share < 1:
            self._set_checkpointed(1.0)
            self._log_and_wait_longer("checkpointing_switched_on", reason)
            return
        uncut = self._processes.gather(self._longest_of_uncuttable(failed))
        longest = max((row for row in rows if row.key in uncut), key=_row_size, default=None)
        if longest is not None:
            self._refuse_too_long(longest, rows, fits)
        self._halve_tokens(reason)

    def _longest_of_uncuttable(self, rows: Sequence[Row]) -> RowKey | None:
        """Return the key of a micro-batch's longest row, or None if the micro-batch can be cut.

        It cannot be cut if all its other rows are prefixes of the longest row.
        """
        longest = max(rows, key=_row_size, default=None)
        if longest is None or computed_tokens(rows, layout=self._layout) > longest.size - 1:
            return None
        return longest.key

    def _refuse_too_long(self, row: Row, rows: Sequence[Row], fits: Callable[[Row], bool]) -> None:
        """Raise an error for all rows as long as `row` if `row` alone does not fit.

        No row is to blame if the shortest row does not fit either, or if an equally long row was
        trained on before: then something else has taken the memory since.
        """
        shortest = min(rows, key=_row_size)
        size = row.size
        if size <= max(self.longest, shortest.size) or fits(row) or not fits(shortest):
            return
        raise too_long_error([other for other in rows if other.size >= size])

    def _halve_tokens(self, reason: str) -> None:
        if self.tokens < 2 * SMALLEST_BUDGET:
            raise ShortOfMemory(
                f"the trainer's memory has no room for {self.tokens} tokens at once:"
                f" {MEMORY_REMEDY}: {reason}"
            )
        self.tokens //= 2
        self._log_and_wait_longer("micro_batches_made_smaller", reason)

    def _log_and_wait_longer(self, event: str, reason: str) -> None:
        """Log an event, and double the wait if this update had retried the full size."""
        if self._is_retrying:
            self._updates_to_wait = min(LONGEST_WAIT, 2 * self._updates_to_wait)
            self._is_retrying = False
        self._updates_since_failure = 0
        log.warning(event, tokens=self.tokens, reason=reason[:200])
