"""Find which rows of a batch belong to which adapter, and how to multiply them."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import torch

# Above this many rows one multiplication over all slots wastes more
# arithmetic than the loop over adapters costs in calls.
SMALL_BATCH_ROWS = 64

# Every layer of a forward pass asks for the same grouping; prefill and decode
# alternate, so a few are enough.
_CACHED_GROUPINGS = 32


@dataclass(frozen=True, slots=True)
class Group:
    """Name the rows of one adapter: a slice where they are neighbours, else their int64 numbers."""

    slot: int
    rows: slice | torch.Tensor


@dataclass(frozen=True, slots=True)
class Spread:
    """Tell where each row finds its own result after a multiplication over all slots.

    All three are int64 of shape (active,): `rows` are the rows with an adapter,
    `by_row` indexes (rows x slots) results and `by_slot` (slots x rows) ones.
    """

    rows: torch.Tensor
    by_row: torch.Tensor
    by_slot: torch.Tensor


@dataclass(frozen=True, slots=True)
class Grouping:
    """Divide one batch: `groups` to go through one by one, or `spread` to do at once (not None)."""

    row_count: int
    groups: tuple[Group, ...]
    spread: Spread | None


@lru_cache(maxsize=_CACHED_GROUPINGS)
def group_rows(slots: tuple[int, ...], lengths: tuple[int, ...], slot_count: int) -> Grouping:
    """Group a batch given as runs: `lengths[i]` rows use slot `slots[i]`, -1 being none.

    The key of the cache is the content of the batch, never the identity of a
    tensor: vLLM rewrites its index tensors in place from step to step.
    """
    row_slots = [s for s, n in zip(slots, lengths, strict=True) for _ in range(n)]
    by_slot: dict[int, list[int]] = {}
    for row, slot in enumerate(row_slots):
        if slot >= 0:
            by_slot.setdefault(slot, []).append(row)
    groups = tuple(Group(slot, _as_rows(rows)) for slot, rows in sorted(by_slot.items()))
    spread = _spread(row_slots, slot_count) if _mixes(row_slots, len(groups)) else None
    return Grouping(len(row_slots), groups, spread)


def _as_rows(rows: list[int]) -> slice | torch.Tensor:
    """Return a slice where it will do: row numbers cost a gather and a scatter."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, dtype=torch.int64)


def _mixes(row_slots: list[int], group_count: int) -> bool:
    """Return whether a small batch has several adapters in more runs than there are adapters."""
    if group_count < 2 or len(row_slots) > SMALL_BATCH_ROWS:
        return False
    runs = sum(slot >= 0 for slot, _ in groupby(row_slots))
    return runs > group_count


def _spread(row_slots: list[int], slot_count: int) -> Spread:
    numbered = torch.tensor(row_slots, dtype=torch.int64)
    rows = (numbered >= 0).nonzero().view(-1)
    slots = numbered[rows]
    return Spread(rows, rows * slot_count + slots, slots * len(row_slots) + rows)
