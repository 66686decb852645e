"""Which rows are computed together (pure): optimiser steps, then micro-batches.

Rows are kept in lexicographic order of their ids, so that those that share a prefix fall
into one micro-batch and the prefix is computed once.
"""

from collections.abc import Sequence

from trainer.rows import Row
from trainer.trees import shared_prefix


def split_steps(rows: Sequence[Row], steps: int) -> list[list[Row]]:
    """Divide an update into at most `steps` optimiser steps of about equal token counts.

    Rows of one prompt are dealt out in turn, so that every step sees every group: a step
    over one group alone would have advantages of one task only.
    """
    dealt: list[list[Row]] = [[] for _ in range(min(steps, len(rows)))]
    for index, row in enumerate(sorted(rows, key=lambda row: row.ids)):
        dealt[index % len(dealt)].append(row)
    return dealt


def plan_micro_batches(rows: Sequence[Row], budget: int) -> list[list[Row]]:
    """Cut rows into micro-batches of at most `budget` distinct tree nodes each.

    A row that is larger than the budget gets a micro-batch of its own.
    """
    batches: list[list[Row]] = []
    nodes = 0
    for row in sorted(rows, key=lambda row: row.ids):
        added = len(row.ids)
        if batches:
            added -= shared_prefix(batches[-1][-1].ids, row.ids)
        if not batches or nodes + added > budget:
            batches.append([row])
            nodes = len(row.ids)
        else:
            batches[-1].append(row)
            nodes += added
    return batches
