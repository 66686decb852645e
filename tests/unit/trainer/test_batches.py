"""Prefix trees and batches: nothing lost, every shared prefix once."""

import random
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.values.sampling import Distribution
from trainer.batches import (
    STRETCH_MULTIPLE,
    Layout,
    Row,
    build_tree,
    computed_tokens,
    divide_among_processes,
    plan_micro_batches,
    split_into_optimiser_steps,
    stretches_of,
    tokens_and_pairs,
)

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12)


def row(ids: list[int], weight: float = 1.0) -> Row:
    return Row(
        episode_id=UUID(int=0),
        agent="default",
        position=0,
        r_total=1.0,
        prompt_ids=tuple(ids[:-1]),
        sampled_ids=(ids[-1],),
        sampled_logprobs=(-1.0,),
        distribution=Distribution(temperature=1.0),
        advantage=1.0,
        weight=weight,
        version=0,
    )


@given(ROWS)
def test_path_of_every_row_in_the_prefix_tree_spells_its_tokens(rows: list[list[int]]) -> None:
    tree = build_tree(rows)
    for ids, path in zip(rows, tree.paths, strict=True):
        assert [tree.tokens[node] for node in path] == ids
        assert [tree.depth[node] for node in path] == list(range(len(ids)))


@given(ROWS)
def test_nodes_of_the_prefix_tree_are_the_distinct_prefixes_of_the_rows(
    rows: list[list[int]],
) -> None:
    prefixes = {tuple(ids[: n + 1]) for ids in rows for n in range(len(ids))}
    assert len(build_tree(rows).tokens) == len(prefixes)


@given(ROWS)
def test_size_of_a_prefix_tree_counts_its_nodes_and_their_ancestors(rows: list[list[int]]) -> None:
    made = [row([9, *ids]) for ids in rows]
    tree = build_tree([r.inputs for r in made])
    assert tokens_and_pairs(made) == (len(tree.tokens), sum(tree.depth) + len(tree.depth))


@given(ROWS)
def test_interval_test_on_the_prefix_tree_finds_exactly_the_ancestors_of_a_node(
    rows: list[list[int]],
) -> None:
    tree = build_tree(rows)
    ancestors = {node: set(path[: i + 1]) for path in tree.paths for i, node in enumerate(path)}
    for node, known in ancestors.items():
        found = {kv for kv in range(len(tree.tokens)) if kv <= node < tree.end[kv]}
        assert found == known


@given(ROWS, st.integers(1, 20))
def test_micro_batches_hold_all_rows_within_the_token_budget_or_their_longest_row(
    rows: list[list[int]], budget: int
) -> None:
    made = [row([9, *ids]) for ids in rows]
    batches = plan_micro_batches(made, budget)
    assert sorted(r.ids for batch in batches for r in batch) == sorted(r.ids for r in made)
    for batch in batches:
        nodes = len(build_tree([r.inputs for r in batch]).tokens)
        assert nodes <= max(budget, *(len(r.inputs) for r in batch))


@given(ROWS, st.integers(1, 5))
def test_optimizer_steps_get_whole_episodes_in_nearly_equal_numbers(
    rows: list[list[int]], steps: int
) -> None:
    made = [
        msgspec.structs.replace(row([9, *ids]), episode_id=UUID(int=number // 2))
        for number, ids in enumerate(rows)
    ]
    dealt = split_into_optimiser_steps(made, steps)
    assert sorted(r.ids for step in dealt for r in step) == sorted(r.ids for r in made)
    episodes = [{r.episode_id for r in step} for step in dealt]
    assert sum(map(len, episodes)) == len(set.union(*episodes))
    assert max(map(len, episodes)) - min(map(len, episodes)) <= 1


@given(ROWS, st.integers(1, 5))
def test_processes_get_equal_numbers_of_batches_and_no_row_is_lost(
    rows: list[list[int]], processes: int
) -> None:
    batches = [[row([0, *ids], weight=1.0 + index)] for index, ids in enumerate(rows)]
    shares = divide_among_processes(batches, processes)
    assert len(shares) == processes
    assert len({len(share) for share in shares}) == 1
    weights = [one.weight for share in shares for batch in share for one in batch]
    assert sorted(weight for weight in weights if weight) == [
        1.0 + index for index in range(len(rows))
    ]


def test_micro_batches_cut_no_chain_of_growing_calls_and_repeat_the_fewest_tokens() -> None:
    """Two episodes of three growing calls: a cut inside one would compute its beginning twice."""
    first = [row([9, *range(1, length)]) for length in (6, 11, 16)]
    second = [row([9, *range(20, 20 + length)]) for length in (3, 8, 18)]
    cut = plan_micro_batches([*second, *first], 20)
    assert [len(batch) for batch in cut] == [3, 3]
    assert sum(computed_tokens(batch) for batch in cut) == 15 + 18


@pytest.mark.parametrize("layout", ["tree", "stretches"])
def test_episode_that_drops_its_thoughts_is_computed_once_where_memory_has_room(
    layout: Layout,
) -> None:
    """Twenty calls of 880 tokens, of which the next ones do not repeat 400."""
    dice = random.Random(0)
    said = [dice.randrange(1000) for _ in range(400)]
    made = []
    for _ in range(20):
        thoughts, reply = ([dice.randrange(1000) for _ in range(n)] for n in (400, 80))
        made.append(row([*said, *thoughts, *reply]))
        said += [*reply, *(dice.randrange(1000) for _ in range(400))]
    distinct = computed_tokens(made)

    def computed(most: int) -> int:
        cut = plan_micro_batches(made, 8192, layout=layout, most=most)
        assert all(
            computed_tokens(own, layout=layout)
            <= max(8192, min(most, 2 * max(one.size for one in own)), *(one.size for one in own))
            for own in cut
        )
        return sum(computed_tokens(own, layout=layout) for own in cut)

    assert computed(40_000) < 1.1 * distinct
    assert computed(0) > 2 * distinct


@pytest.mark.parametrize(
    ("layout", "tokens"), [("tree", 112), ("stretches", 151), ("chain", 215), ("whole", 320)]
)
def test_number_of_computed_tokens_depends_on_the_way_of_sharing_prefixes(
    layout: Layout, tokens: int
) -> None:
    """Three rows share 103 tokens: a stretch continues the first 64 of them."""
    shared = list(range(1, 104))
    made = [
        row([*shared, 104, 105, 106]),
        row([*shared, 104, 105, 106, 107, 108, 109]),
        row([*shared, 113, 114, 115, 116, 117]),
    ]
    assert computed_tokens(made, layout=layout) == tokens


@given(ROWS)
def test_stretches_of_shared_prefixes_spell_their_rows_and_repeat_less_than_a_stretch(
    rows: list[list[int]],
) -> None:
    made = [
        msgspec.structs.replace(row([9, *(one for one in ids for _ in range(40))]), position=number)
        for number, ids in enumerate(rows)
    ]
    stretches, last = stretches_of(made)
    spelled: list[list[int]] = []
    for own, begin, end, parent in stretches:
        before = [] if parent is None else spelled[parent]
        assert len(before) == begin
        assert begin % STRETCH_MULTIPLE == 0
        assert end - begin > 1 or parent is None
        spelled.append([*before, *own.inputs[begin:end]])
    for one in made:
        assert spelled[last[one.key]][: one.size - 1] == list(one.inputs)
    computed = sum(end - begin for _, begin, end, _ in stretches)
    assert computed == computed_tokens(made, layout="stretches")
    assert computed - computed_tokens(made) < len(made) * (STRETCH_MULTIPLE + 2)
