"""Divide training rows into optimiser steps, and these into micro-batches (pure).

Rows are kept in lexicographic order of their token ids, so that rows that share a prefix fall
into one micro-batch and the prefix is computed once.
"""

from collections.abc import Sequence

import msgspec

from trainer.batches.rows import Row
from trainer.batches.trees import build_tree, shared_prefix


def split_steps(rows: Sequence[Row], steps: int) -> list[list[Row]]:
    """Divide an update into at most `steps` optimiser steps with about equal numbers of tokens.

    Rows are dealt out in lexicographic order, one to each step in turn, so that every step sees
    every group: the advantages of a step over one group alone would be those of one task only.
    """
    dealt: list[list[Row]] = [[] for _ in range(min(steps, len(rows)))]
    for index, row in enumerate(sorted(rows, key=lambda row: row.ids)):
        dealt[index % len(dealt)].append(row)
    return dealt


def plan_micro_batches(rows: Sequence[Row], budget: int, *, merge: bool = True) -> list[list[Row]]:
    """Cut rows into micro-batches of at most `budget` computed tokens each.

    With `merge` these are the distinct nodes of the micro-batch's prefix tree. Without it they are
    all input tokens, and rows of equal length come together. A row larger than `budget` gets a
    micro-batch of its own.
    """
    cut: list[list[Row]] = []
    tokens = 0
    for row in sorted(rows, key=_by_prefix if merge else _by_length):
        added = len(row.inputs)
        if cut and merge:
            added -= shared_prefix(cut[-1][-1].inputs, row.inputs)
        if not cut or tokens + added > budget:
            cut.append([row])
            tokens = len(row.inputs)
        else:
            cut[-1].append(row)
            tokens += added
    return cut


def _by_prefix(row: Row) -> tuple[int, ...]:
    """Return a sort key: the row's inputs, then its last id."""
    return (*row.inputs, -1, row.ids[-1])


def _by_length(row: Row) -> tuple[int, ...]:
    """Return a sort key: the row's number of inputs, then its ids."""
    return (len(row.inputs), *row.ids)


def computed_tokens(rows: Sequence[Row], *, merge: bool = True) -> int:
    """Return how many tokens a micro-batch computes."""
    if merge:
        return len(build_tree([row.inputs for row in rows]).tokens)
    return sum(len(row.inputs) for row in rows)


def share_out(micro_batches: Sequence[Sequence[Row]], processes: int) -> list[list[Sequence[Row]]]:
    """Divide micro-batches among processes: equally many for each, with about equally many tokens.

    All processes gather the sharded layers together, so each must compute as often as the others.
    Where a micro-batch is missing, the smallest one is computed again with weight 0.
    """
    if processes == 1:
        return [list(micro_batches)]
    by_size = sorted(micro_batches, key=lambda rows: -sum(len(row.ids) for row in rows))
    idle = [msgspec.structs.replace(row, weight=0.0) for row in by_size[-1]]
    by_size += [idle] * (-len(by_size) % processes)
    shares: list[list[Sequence[Row]]] = [[] for _ in range(processes)]
    for start in range(0, len(by_size), processes):
        lightest = sorted(shares, key=lambda share: sum(len(r.ids) for rows in share for r in rows))
        for share, rows in zip(lightest, by_size[start : start + processes], strict=True):
            share.append(rows)
    return shares
