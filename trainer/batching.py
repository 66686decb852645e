"""Which rows are computed together (pure): optimiser steps, then micro-batches.

Rows are kept in lexicographic order of their ids, so that those that share a prefix fall
into one micro-batch and the prefix is computed once.
"""

from collections.abc import Sequence

import msgspec

from trainer.rows import Row
from trainer.trees import build_tree, shared_prefix


def split_steps(rows: Sequence[Row], steps: int) -> list[list[Row]]:
    """Divide an update into at most `steps` optimiser steps of about equal token counts.

    Rows of one prompt are dealt out in turn, so that every step sees every group: a step
    over one group alone would have advantages of one task only.
    """
    dealt: list[list[Row]] = [[] for _ in range(min(steps, len(rows)))]
    for index, row in enumerate(sorted(rows, key=lambda row: row.ids)):
        dealt[index % len(dealt)].append(row)
    return dealt


def plan_micro_batches(rows: Sequence[Row], budget: int, *, merge: bool = True) -> list[list[Row]]:
    """Cut rows into micro-batches of at most `budget` computed tokens each.

    Merged, these are the distinct nodes of their prefix tree; else all, and rows of one
    length are together. A row that is larger than the budget gets a micro-batch of its own.
    """
    batches: list[list[Row]] = []
    tokens = 0
    for row in sorted(rows, key=_by_prefix if merge else _by_length):
        added = len(row.inputs)
        if batches and merge:
            added -= shared_prefix(batches[-1][-1].inputs, row.inputs)
        if not batches or tokens + added > budget:
            batches.append([row])
            tokens = len(row.inputs)
        else:
            batches[-1].append(row)
            tokens += added
    return batches


def _by_prefix(row: Row) -> tuple[int, ...]:
    """In the order of `inputs`; the last id decides between those that read the same."""
    return (*row.inputs, -1, row.ids[-1])


def _by_length(row: Row) -> tuple[int, ...]:
    return (len(row.inputs), *row.ids)


def computed_tokens(rows: Sequence[Row], *, merge: bool = True) -> int:
    """How many tokens a micro-batch computes."""
    if merge:
        return len(build_tree([row.inputs for row in rows]).tokens)
    return sum(len(row.inputs) for row in rows)


def share_out(batches: Sequence[Sequence[Row]], processes: int) -> list[list[Sequence[Row]]]:
    """Divide micro-batches among processes, as many to each and about as many tokens.

    Sharded layers are gathered by all processes together, so that each must compute as often
    as the others: where a micro-batch is missing, the smallest is computed for nothing.
    """
    if processes == 1:
        return [list(batches)]
    by_size = sorted(batches, key=lambda rows: -sum(len(row.ids) for row in rows))
    idle = [msgspec.structs.replace(row, weight=0.0) for row in by_size[-1]]
    by_size += [idle] * (-len(by_size) % processes)
    shares: list[list[Sequence[Row]]] = [[] for _ in range(processes)]
    for start in range(0, len(by_size), processes):
        lightest = sorted(shares, key=lambda share: sum(len(r.ids) for rows in share for r in rows))
        for share, rows in zip(lightest, by_size[start : start + processes], strict=True):
            share.append(rows)
    return shares
