"""Micro-batches get smaller where memory runs out, and larger again; a row too long is named."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.batches import Row, bare_row
from trainer.errors import OUT_OF_MEMORY, TOO_LONG, CompanionFailed, Unusable
from trainer.learners.budget import (
    LONGEST_WAIT,
    MemoryRanOut,
    MicroBatches,
    TokenBudget,
    catch_out_of_memory,
    is_out_of_memory,
)
from trainer.learners.processes import FINE, Processes

FULL = 1024


def row(number: int, tokens: int) -> Row:
    return bare_row(number, [number] * (tokens - 4), [1, 2, 3, 4])


def computing(most: int) -> Callable[[MicroBatches], int]:
    """What a machine does that has room for `most` tokens at once: count them."""

    def run(micro_batches: MicroBatches) -> int:
        for rows in micro_batches:
            with catch_out_of_memory(rows, Processes()):
                if sum(len(one.ids) for one in rows) > most:
                    raise torch.OutOfMemoryError("CUDA out of memory")
        return len(micro_batches)

    return run


def fit(budget: TokenBudget, rows: list[Row], most: int) -> int:
    found, _ = budget.run_fitting(
        rows, computing(most), lambda: None, lambda one: len(one.ids) <= most
    )
    return found


def budget() -> TokenBudget:
    return TokenBudget(FULL, layout="whole", processes=Processes())


@given(lengths=st.lists(st.integers(5, 3000), min_size=2, max_size=12), most=st.integers(70, 3000))
def test_training_rows_are_named_unusable_exactly_if_they_alone_do_not_fit_into_memory(
    lengths: list[int], most: int
) -> None:
    rows = [row(number, tokens) for number, tokens in enumerate(lengths)]
    long = {one.episode_id for one in rows if len(one.ids) > most}
    if not long:
        fit(budget(), rows, most)
        return
    with pytest.raises(Unusable) as raised:
        fit(budget(), rows, most)
    if min(lengths) > most:
        assert (raised.value.reason, raised.value.episodes) == (OUT_OF_MEMORY, {})
        return
    named = set(raised.value.episodes)
    assert raised.value.reason == TOO_LONG
    assert named
    assert named <= long
    # All of at least that length: each would be the next to stop an update.
    shortest = min(len(one.ids) for one in rows if one.episode_id in named)
    assert {one.episode_id for one in rows if len(one.ids) >= shortest} == named


def test_training_row_that_fitted_before_is_not_blamed_for_a_lack_of_memory() -> None:
    made = budget()
    rows = [row(0, 900), row(1, 100)]
    fit(made, rows, 2000)
    with pytest.raises(Unusable) as raised:
        fit(made, rows, 500)
    assert (raised.value.reason, raised.value.episodes) == (OUT_OF_MEMORY, {})


def test_next_update_tries_the_recipes_micro_batch_size_again() -> None:
    made = budget()
    rows = [row(number, 100) for number in range(30)]
    made.begin_update()
    calm = fit(made, rows, FULL)
    made.begin_update()
    assert fit(made, rows, 300) > calm
    assert made.tokens == 256
    made.begin_update()
    assert fit(made, rows, FULL) == calm


def test_attempts_at_larger_micro_batches_become_rare_while_memory_stays_short() -> None:
    made = budget()
    rows = [row(number, 100) for number in range(30)]
    attempts = []
    for update in range(300):
        made.begin_update()
        attempts += [update] if made.tokens == FULL else []
        fit(made, rows, 300)
    pauses = [after - before for before, after in pairwise(attempts)]
    assert pauses == [1, 2, 4, 8, 16, 32, *[LONGEST_WAIT] * (len(pauses) - 6)]
    while made.tokens < FULL:
        made.begin_update()
    fit(made, rows, FULL)
    made.begin_update()
    fit(made, rows, 300)
    made.begin_update()
    assert made.tokens == FULL


def test_planned_checkpointing_of_layers_does_not_keep_larger_micro_batches_rare() -> None:
    made = TokenBudget(FULL, layout="whole", processes=Processes(), checkpoint=lambda _: None)
    rows = [row(number, 100) for number in range(30)]
    for most in [300] * 100 + [FULL] * (LONGEST_WAIT + 1) + [300]:
        made.begin_update(0.4)
        fit(made, rows, most)
    assert (made.checkpointed_share, made.tokens) == (1.0, 256)
    made.begin_update(0.4)
    assert (made.checkpointed_share, made.tokens) == (0.4, FULL)


def test_only_memory_errors_count_as_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60)
    assert is_out_of_memory(raised.value)
    with pytest.raises(RuntimeError, match="shapes"), catch_out_of_memory([], Processes()):
        raise RuntimeError("shapes differ")


def test_trainer_process_that_ends_its_part_learns_that_another_has_no_memory() -> None:
    class Met(Processes):
        def meet(self, own_state: int = FINE) -> None:
            raise CompanionFailed(is_memory=True)

    with pytest.raises(MemoryRanOut) as raised, catch_out_of_memory([row(0, 10)], Met()):
        pass
    assert raised.value.rows == []


def test_cudas_error_outside_the_allocator_counts_as_out_of_memory() -> None:
    said = "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"
    assert is_out_of_memory(torch.AcceleratorError(said))
    assert not is_out_of_memory(torch.AcceleratorError("CUDA error: device-side assert triggered"))


@pytest.mark.parametrize(
    ("planned", "most", "longest", "share", "tokens"),
    [
        (0.0, 2000, 100, 0.0, FULL),
        (0.4, 2000, 100, 0.4, FULL),
        (0.0, 600, 100, 1.0, FULL),
        (0.4, 600, 100, 1.0, FULL),
        (0.0, 300, 100, 1.0, FULL // 2),
        # Before a row counts as too long, too.
        (0.0, 1200, 2000, 1.0, FULL),
    ],
)
def test_checkpointing_comes_before_micro_batches_are_cut(
    planned: float, most: int, longest: int, share: float, tokens: int
) -> None:
    """Here `most` tokens have room at once, and twice as many with checkpointing."""
    room = most

    def checkpoint(share: float) -> None:
        nonlocal room
        room = 2 * most if share == 1 else most

    def run(micro_batches: MicroBatches) -> int:
        return computing(room)(micro_batches)

    made = TokenBudget(FULL, layout="whole", processes=Processes(), checkpoint=checkpoint)
    rows = [row(0, longest), *(row(number, 100) for number in range(1, 30))]
    made.begin_update(planned)
    made.run_fitting(
        rows,
        run,
        lambda: None,
        lambda one: len(one.ids) <= room,
    )
    assert (made.checkpointed_share, made.tokens) == (share, tokens)
    # The next update tries without.
    made.begin_update()
    assert (made.checkpointed_share, made.tokens) == (0.0, FULL)


def test_forward_only_batches_are_cut_without_checkpointing() -> None:
    switched: list[float] = []
    made = TokenBudget(FULL, layout="whole", processes=Processes(), checkpoint=switched.append)
    rows = [row(number, 100) for number in range(30)]
    made.run_fitting(rows, computing(600), lambda: None, lambda _: True, trains=False)
    assert (switched, made.tokens) == ([], FULL // 2)
