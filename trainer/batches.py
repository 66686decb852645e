"""Turn credited transitions into the rows, prefix trees and micro-batches of an update (pure).

Token ids and log-probabilities are the recorded ones, except for the replies of corrections.

Rows of an update share prefixes: the tasks' prompts, and earlier calls that an episode's calls
repeat. A model's `Layout` says which shared tokens it computes only once
(`trainer.learners.scoring`):

    tree       one forward pass over the prefix tree: each distinct token is computed once
    stretches  one pass for each unbranched stretch, which continues from its parent's states
    chain      one pass for a row and all rows that are prefixes of it
    whole      one pass for each row, with the model's own LM head
"""

import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Final, Literal, NamedTuple
from uuid import UUID

import msgspec

from store.records import Record
from store.values.packing import ids_array, unpack_logprobs
from store.values.sampling import Distribution, distribution_of
from trainer.credit.assign import TransitionCredit

# The key of a transition within an update: its episode's id and its call's index in the episode.
RowKey = tuple[UUID, int]
PLAIN_SOFTMAX: Final = Distribution(temperature=1.0)

Layout = Literal["tree", "stretches", "chain", "whole"]
# From the layout that computes the fewest tokens to the layout that works with every model.
LAYOUTS: Final[tuple[Layout, ...]] = ("tree", "stretches", "chain", "whole")
# Stretches begin at multiples of this many tokens: a shorter stretch would take as long, since the
# pass over the weights dominates, and recurrent layers compute in chunks of this size.
STRETCH_MULTIPLE: Final = 64


class Row(Record, frozen=True, kw_only=True):
    """One transition in training form.

    Shapes: `prompt_ids` (P,), `sampled_ids` and `sampled_logprobs` (S,) in nats, S ≥ 1. `position`
    is the call's index among its episode's calls, `version` the policy version that sampled it,
    and `distribution` says how the server shaped that policy's logits before it sampled.
    `r_total` is the return, `advantage` the return against the baseline, `weight` the row's share
    of the update's loss. `token_advantages` (S,) replace `advantage` if each token has its own.
    The server did not give the log-probabilities of a `recomputed` row: they are empty until the
    version that sampled it has computed them. Rows that are imitated leave them empty, because the
    loss of `sft` uses no ratios. `masks` (S,) are the packed masks of the call's grammar, if it had
    one (`trainer.learners.replay.grammars`); the learner makes them. For a correction,
    `sampled_ids` is the right reply, which no policy sampled, so there is no ratio either.
    """

    episode_id: UUID
    agent: str
    position: int

    prompt_ids: Sequence[int]
    sampled_ids: Sequence[int]
    sampled_logprobs: tuple[float, ...]
    distribution: Distribution
    r_total: float
    advantage: float
    weight: float
    version: int
    recomputed: bool = False
    is_correction: bool = False
    masks: tuple[bytes, ...] = ()
    token_advantages: tuple[float, ...] = ()

    @property
    def key(self) -> RowKey:
        """Return the key that identifies a row within its update.

        A correction uses the bitwise complement of its call's position, a negative number, so that
        its key differs from that of the call's own row.
        """
        return self.episode_id, ~self.position if self.is_correction else self.position

    @property
    def ids(self) -> "array[int]":
        """Return prompt and sampled ids, (P + S,)."""
        return array("i", self.prompt_ids) + array("i", self.sampled_ids)

    @property
    def inputs(self) -> "array[int]":
        """Return all ids but the last, (P + S − 1,): the model's input for log-probabilities."""
        return self.ids[:-1]

    @property
    def size(self) -> int:
        """Return how many ids there are, P + S."""
        return len(self.prompt_ids) + len(self.sampled_ids)


def bare_row(number: int, prompt_ids: Sequence[int], sampled_ids: Sequence[int]) -> Row:
    """Return a row for computing log-probabilities only; its episode id is made of `number`."""
    return Row(
        episode_id=UUID(int=number),
        agent="",
        position=0,
        prompt_ids=array("i", prompt_ids),
        sampled_ids=array("i", sampled_ids),
        sampled_logprobs=(0.0,) * len(sampled_ids),
        distribution=PLAIN_SOFTMAX,
        r_total=0.0,
        advantage=0.0,
        weight=0.0,
        version=0,
    )


def with_logprobs(rows: Sequence[Row], values: Mapping[RowKey, Sequence[float]]) -> list[Row]:
    """Return the rows; those with a key in `values` get these sampled log-probabilities."""
    return [
        msgspec.structs.replace(row, sampled_logprobs=tuple(values[row.key]))
        if row.key in values
        else row
        for row in rows
    ]


def training_rows(credited: Iterable[TransitionCredit], *, imitated: bool = False) -> list[Row]:
    """Return the rows of the transitions that are trained (those without a `reason`).

    With `imitated`, rows get no sampled log-probabilities, and the plain softmax as their
    distribution, whatever settings they were sampled with.
    """
    return [_row(credit, imitated=imitated) for credit in credited if credit.reason is None]


def _row(credit: TransitionCredit, *, imitated: bool) -> Row:
    call, tokens = credit.call, credit.call.tokens
    return Row(
        episode_id=credit.episode_id,
        agent=call.agent,
        position=credit.position,
        prompt_ids=ids_array(tokens.prompt_ids),
        sampled_ids=ids_array(tokens.sampled_ids),
        sampled_logprobs=() if imitated else tuple(unpack_logprobs(tokens.sampled_logprobs)),
        distribution=PLAIN_SOFTMAX if imitated else distribution_of(call.sampling),
        # `r_total` and `advantage` are None only if a teacher gives each token its own advantage.
        r_total=credit.r_total or 0.0,
        advantage=credit.advantage or 0.0,
        weight=credit.weight,
        version=call.policy_version or 0,
        recomputed=not imitated and not tokens.sampled_logprobs,
    )


def correction_rows(
    credited: Iterable[TransitionCredit], replies: Mapping[str, Sequence[int]]
) -> list[Row]:
    """Return a row for each correction whose reply has token ids in `replies`, by call id."""
    return [
        msgspec.structs.replace(
            bare_row(0, ids_array(credit.call.tokens.prompt_ids), replies[str(credit.call.id)]),
            episode_id=credit.episode_id,
            agent=credit.call.agent,
            position=credit.position,
            sampled_logprobs=(),
            advantage=1.0,
            weight=credit.correction,
            version=credit.call.policy_version or 0,
            is_correction=True,
        )
        for credit in credited
        if credit.correction and str(credit.call.id) in replies
    ]


class Tree(Record, frozen=True, kw_only=True):
    """A packed prefix tree of N nodes, one token each.

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
        shared = shared_prefix_length(open_row, row)
        _set_ends(open_path[shared:], end, len(tokens))
        open_path = open_path[:shared]
        for position in range(shared, len(row)):
            open_path.append(len(tokens))
            tokens.append(row[position])
            depth.append(position)
            end.append(0)
        paths[index] = tuple(open_path)
        open_row = row
    _set_ends(open_path, end, len(tokens))
    return Tree(tokens=tuple(tokens), depth=tuple(depth), end=tuple(end), paths=tuple(paths))


def pad_tree(tree: Tree, multiple: int) -> Tree:
    """Return `tree` padded to a multiple of `multiple` nodes; no other node sees the padding."""
    size = len(tree.tokens)
    more = range(size, size + -size % multiple)
    return Tree(
        tokens=tree.tokens + (0,) * len(more),
        depth=tree.depth + (0,) * len(more),
        end=tree.end + tuple(node + 1 for node in more),
        paths=tree.paths,
    )


def shared_prefix_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many leading tokens two rows share."""
    # Binary search: comparing bytes is far quicker than comparing numbers one by one.
    left_bytes, right_bytes = (array("i", row).tobytes() for row in (left, right))
    size, shared, differ = array("i").itemsize, 0, min(len(left), len(right)) + 1
    while differ - shared > 1:
        middle = (shared + differ) // 2
        if left_bytes[: middle * size] == right_bytes[: middle * size]:
            shared = middle
        else:
            differ = middle
    return shared


def _set_ends(nodes: Sequence[int], end: list[int], size: int) -> None:
    for node in nodes:
        end[node] = size


def split_into_optimiser_steps(rows: Sequence[Row], steps: int) -> list[list[Row]]:
    """Divide an update into at most `steps` optimiser steps of about equally many episodes.

    An episode stays whole, as its rows share prefixes. Episodes are dealt out by their first row in
    lexicographic order, one to each step in turn, so that every step sees every group: a step over
    one group alone would learn from one task only.
    """
    by_episode: dict[UUID, list[Row]] = {}
    for row in sorted(rows, key=_lexicographic_key):
        by_episode.setdefault(row.episode_id, []).append(row)
    dealt: list[list[Row]] = [[] for _ in range(min(steps, len(by_episode)))]
    for index, episode_rows in enumerate(by_episode.values()):
        dealt[index % len(dealt)] += episode_rows
    return dealt


def chains_of(rows: Sequence[Row], layout: Layout) -> list[list[Row]]:
    """Return chains of rows, in the order of computation; a chain ends with its longest row.

    All other rows of a chain are prefixes of its longest row, and are computed with it. In the
    layout `whole` each row is a chain of its own. In the layouts `tree` and `stretches` chains that
    share a prefix are adjacent; in the others chains are ordered by length.
    """
    chains: list[list[Row]] = []
    previous_inputs = b""
    # In lexicographic order a row is directly followed by all rows that it is a prefix of.
    for key, row in sorted(((_lexicographic_key(row), row) for row in rows), key=itemgetter(0)):
        if chains and layout != "whole" and key[0].startswith(previous_inputs):
            chains[-1].append(row)
        else:
            chains.append([row])
        previous_inputs = key[0]
    if layout not in ("tree", "stretches"):
        chains.sort(key=lambda chain: chain[-1].size)
    return chains


def _lexicographic_key(row: Row) -> tuple[bytes, int]:
    """Return a key that sorts rows by their inputs (as big-endian bytes), then by their last id."""
    ids = row.inputs
    if sys.byteorder == "little":
        ids.byteswap()
    return ids.tobytes(), row.sampled_ids[-1]


def plan_micro_batches(
    rows: Sequence[Row], budget: int, *, layout: Layout = "tree", most: int = 0
) -> list[list[Row]]:
    """Cut rows into micro-batches with the fewest computed tokens, then the fewest micro-batches.

    A micro-batch computes at most `budget` tokens. It may exceed the budget up to the length of its
    longest row, or, within `most` tokens, up to twice that length: so an episode whose calls drop
    earlier thoughts is not computed again for each call. No chain is cut. In the layout `tree`,
    tokens are distinct nodes of the prefix tree.
    """
    chains = chains_of(rows, layout)
    sizes = [chain[-1].size - 1 for chain in chains]
    repeated = _count_repeated_tokens(chains, layout)
    # best[n] describes the best cut of the first n chains: its tokens, its number of micro-batches,
    # and the first chain of its last micro-batch.
    best = [(0, 0, 0)]
    largest = max([budget, most, *sizes])
    for stop in range(1, len(chains) + 1):
        choices, tokens_after, longest = [], 0, 0
        for start in range(stop - 1, -1, -1):
            tokens, longest = tokens_after + sizes[start], max(longest, sizes[start])
            if tokens > largest:
                break
            tokens_after = tokens - repeated[start]
            if tokens <= max(budget, longest, min(2 * longest, most)):
                choices.append((best[start][0] + tokens, best[start][1] + 1, start))
        best.append(min(choices))
    cut: list[list[Row]] = []
    stop = len(chains)
    while stop:
        start = best[stop][2]
        cut.append([row for chain in chains[start:stop] for row in chain])
        stop = start
    return cut[::-1]


def _count_repeated_tokens(chains: Sequence[Sequence[Row]], layout: Layout) -> list[int]:
    """Return, for each chain, how many of its tokens the chain before has already computed."""
    if layout not in ("tree", "stretches"):
        return [0] * len(chains)
    inputs = [chain[-1].inputs for chain in chains]
    shared = [0, *(shared_prefix_length(*pair) for pair in pairwise(inputs))]
    if layout == "tree":
        return shared
    # A stretch has two tokens or more: models treat a single token as a decoding step, which
    # changes their states in place.
    longest_shared = [0, *(max(0, min(map(len, pair)) - 2) for pair in pairwise(inputs))]
    return [
        min(lengths) // STRETCH_MULTIPLE * STRETCH_MULTIPLE
        for lengths in zip(shared, longest_shared, strict=True)
    ]


class Stretch(NamedTuple):
    """Tokens that are computed in one pass: the inputs of `row` from `begin` to `end`.

    `parent` is the index of the stretch that they continue, if any.
    """

    row: Row
    begin: int
    end: int
    parent: int | None


def stretches_of(rows: Sequence[Row]) -> tuple[list[Stretch], dict[RowKey, int]]:
    """Cut chains where other chains branch off; return all stretches, each after its parent.

    The second result maps each row's key to the index of its chain's last stretch.
    """
    chains = chains_of(rows, "stretches")
    repeated = _count_repeated_tokens(chains, "stretches")
    stretches: list[Stretch] = []
    last: dict[RowKey, int] = {}
    # Stretches up to `parent` cover the first `begin` tokens, which chains `start` to `stop` share.
    waiting: list[tuple[int, int, int, int | None]] = [(0, len(chains), 0, None)]
    while waiting:
        start, stop, begin, parent = waiting.pop()
        ends = [repeated[index] for index in range(start + 1, stop)]
        end = min(ends, default=chains[start][-1].size - 1)
        if end > begin:
            stretches.append(Stretch(chains[start][-1], begin, end, parent))
            parent = len(stretches) - 1
        if not ends and parent is not None:
            last |= dict.fromkeys((row.key for row in chains[start]), parent)
            continue
        cuts = [start, *(start + 1 + i for i, cut in enumerate(ends) if cut == end), stop]
        waiting += [(*pair, end, parent) for pair in reversed(list(pairwise(cuts)))]
    return stretches, last


def computed_tokens(rows: Sequence[Row], *, layout: Layout = "tree") -> int:
    """Return how many tokens a micro-batch computes."""
    chains = chains_of(rows, layout)
    return sum(chain[-1].size - 1 for chain in chains) - sum(_count_repeated_tokens(chains, layout))


def tokens_and_pairs(rows: Sequence[Row]) -> tuple[int, int]:
    """Return the numbers of distinct input tokens of `rows` and of pairs of attending tokens.

    Tokens after different prefixes are distinct. Each token attends to its prefix and to itself.
    """
    chains = chains_of(rows, "tree")
    sizes = [chain[-1].size - 1 for chain in chains]
    repeated = _count_repeated_tokens(chains, "tree")
    pairs = sum(
        (size * (size + 1) - shared * (shared + 1)) // 2
        for size, shared in zip(sizes, repeated, strict=True)
    )
    return sum(sizes) - sum(repeated), pairs


def divide_among_processes(
    micro_batches: Sequence[Sequence[Row]], processes: int, *, layout: Layout = "tree"
) -> list[list[Sequence[Row]]]:
    """Divide micro-batches among processes: equally many for each, with about equally many tokens.

    All processes gather the sharded layers together, so all must compute equally often. If the
    number does not divide evenly, the smallest micro-batch is repeated with weight 0.
    """
    if processes == 1:
        return [list(micro_batches)]
    sized = [(computed_tokens(rows, layout=layout), rows) for rows in micro_batches]
    sized.sort(key=lambda pair: -pair[0])
    tokens, smallest = sized[-1]
    idle = [msgspec.structs.replace(row, weight=0.0) for row in smallest]
    sized += [(tokens, idle)] * (-len(sized) % processes)
    shares: list[list[Sequence[Row]]] = [[] for _ in range(processes)]
    totals = [0] * processes
    for start in range(0, len(sized), processes):
        lightest = sorted(range(processes), key=totals.__getitem__)
        for process, (tokens, rows) in zip(lightest, sized[start : start + processes], strict=True):
            shares[process].append(rows)
            totals[process] += tokens
    return shares
