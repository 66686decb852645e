"""Turn credited transitions into the rows, prefix trees and micro-batches of an update (pure).

Nothing is tokenised again: token ids and log-probabilities are the recorded ones.
"""

from collections.abc import Iterable, Sequence
from typing import Final
from uuid import UUID

import msgspec

from store.records import Record
from store.values.packing import unpack_ids, unpack_logprobs
from store.values.sampling import Distribution, distribution_of
from trainer.credit.assign import TransitionCredit

# The key of a transition within an update: its episode's id and its call's index there.
RowKey = tuple[UUID, int]
PLAIN: Final = Distribution(temperature=1.0)


class Row(Record, frozen=True, kw_only=True):
    """Hold one transition in training form.

    Shapes: `prompt_ids` (P,), `sampled_ids` and `sampled_logprobs` (S,) in nats, S ≥ 1. `position`
    is the call's index among its episode's calls, `version` the policy version that sampled it,
    and `distribution` what the server made of that policy's logits before it sampled.
    `r_total` is its return, `advantage` the return against the baseline, `weight` its share of
    the update's loss. The server did not give the log-probabilities of a `recomputed` row: they
    are empty until the version that sampled it has computed them. They stay empty where rows are
    imitated, as nothing is compared with them. `masks` (S,) are the packed masks
    of a grammar, if one held it (`trainer.learners.replay.grammars`); the learner makes them.
    """

    episode_id: UUID
    agent: str
    position: int

    prompt_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]
    sampled_logprobs: tuple[float, ...]
    distribution: Distribution
    r_total: float
    advantage: float
    weight: float
    version: int
    recomputed: bool = False
    masks: tuple[bytes, ...] = ()

    @property
    def key(self) -> RowKey:
        """Return the key that identifies a row within its update."""
        return self.episode_id, self.position

    @property
    def ids(self) -> tuple[int, ...]:
        """Return prompt and sampled ids, (P + S,)."""
        return self.prompt_ids + self.sampled_ids

    @property
    def inputs(self) -> tuple[int, ...]:
        """Return all ids but the last, (P + S − 1,): the ids that the model reads to score."""
        return self.ids[:-1]


def bare_row(number: int, prompt_ids: Sequence[int], sampled_ids: Sequence[int]) -> Row:
    """Return a row of no episode, of which nothing but log-probabilities is computed."""
    return Row(
        episode_id=UUID(int=number),
        agent="",
        position=0,
        prompt_ids=tuple(prompt_ids),
        sampled_ids=tuple(sampled_ids),
        sampled_logprobs=(0.0,) * len(sampled_ids),
        distribution=PLAIN,
        r_total=0.0,
        advantage=0.0,
        weight=0.0,
        version=0,
    )


def training_rows(credited: Iterable[TransitionCredit], *, imitated: bool = False) -> list[Row]:
    """Return the rows of the transitions that are trained (those without a `reason`).

    Where they are `imitated`, the loss is of the plain softmax, whatever they were sampled from.
    """
    return [_row(credit, imitated=imitated) for credit in credited if credit.reason is None]


def _row(credit: TransitionCredit, *, imitated: bool) -> Row:
    assert credit.advantage is not None
    assert credit.r_total is not None
    call, tokens = credit.call, credit.call.tokens
    return Row(
        episode_id=credit.episode_id,
        agent=call.agent,
        position=credit.position,
        prompt_ids=tuple(unpack_ids(tokens.prompt_ids)),
        sampled_ids=tuple(unpack_ids(tokens.sampled_ids)),
        sampled_logprobs=() if imitated else tuple(unpack_logprobs(tokens.sampled_logprobs)),
        distribution=PLAIN if imitated else distribution_of(call.sampling),
        r_total=credit.r_total,
        advantage=credit.advantage,
        weight=credit.weight,
        version=call.policy_version or 0,
        recomputed=not imitated and not tokens.sampled_logprobs,
    )


class Tree(Record, frozen=True, kw_only=True):
    """Hold a packed prefix tree of N nodes, one token each.

    Shapes: `tokens`, `depth` and `end` are (N,); `end[i]` is one past the last descendant of i.
    `paths[r]` are the nodes of row r, root first.
    """

    tokens: tuple[int, ...]
    depth: tuple[int, ...]
    end: tuple[int, ...]
    paths: tuple[tuple[int, ...], ...]


def build_tree(rows: Sequence[Sequence[int]]) -> Tree:
    """Return the prefix tree of `rows`, non-empty sequences of token ids."""
    tokens: list[int] = []
    depth: list[int] = []
    end: list[int] = []
    paths: list[tuple[int, ...]] = [()] * len(rows)
    open_path: list[int] = []
    open_row: Sequence[int] = ()
    for index in sorted(range(len(rows)), key=lambda index: tuple(rows[index])):
        row = rows[index]
        shared = shared_prefix(open_row, row)
        _close(open_path[shared:], end, len(tokens))
        open_path = open_path[:shared]
        for position in range(shared, len(row)):
            open_path.append(len(tokens))
            tokens.append(row[position])
            depth.append(position)
            end.append(0)
        paths[index] = tuple(open_path)
        open_row = row
    _close(open_path, end, len(tokens))
    return Tree(tokens=tuple(tokens), depth=tuple(depth), end=tuple(end), paths=tuple(paths))


def padded(tree: Tree, multiple: int) -> Tree:
    """Return `tree` with nodes that no other node sees, up to a multiple of `multiple` nodes."""
    size = len(tree.tokens)
    more = range(size, size + -size % multiple)
    return Tree(
        tokens=tree.tokens + (0,) * len(more),
        depth=tree.depth + (0,) * len(more),
        end=tree.end + tuple(node + 1 for node in more),
        paths=tree.paths,
    )


def shared_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many leading tokens two rows share."""
    length = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        length += 1
    return length


def _close(nodes: Sequence[int], end: list[int], size: int) -> None:
    for node in nodes:
        end[node] = size


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

    def order(row: Row) -> tuple[int, ...]:
        return (*row.inputs, -1, row.ids[-1]) if merge else (len(row.inputs), *row.ids)

    cut: list[list[Row]] = []
    tokens = 0
    for row in sorted(rows, key=order):
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
