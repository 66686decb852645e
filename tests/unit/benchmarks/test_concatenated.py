"""An episode as one concatenated sequence: one path, every sampled token on it, equal weights."""

from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.concatenated import _concatenate_updates, concatenated
from store.ids import new_id
from store.records import Group
from store.updates.claims import Claim
from tests.support.records import tokens
from tests.support.stored import episode, transition
from trainer.batches.micro_batches import computed_tokens
from trainer.batches.rows import Row, bare_row
from trainer.recipes.recipe import Recipe
from trainer.updates import plan

ids = st.lists(st.integers(0, 4), min_size=1, max_size=6)
episodes = st.lists(st.lists(st.tuples(ids, ids), min_size=1, max_size=4), min_size=1, max_size=3)


def rows_of(made: list[list[tuple[list[int], list[int]]]]) -> list[Row]:
    return [
        msgspec.structs.replace(
            bare_row(0, prompt, sampled),
            episode_id=UUID(int=number),
            position=position,
            weight=1 / (len(made) * len(calls)),
        )
        for number, calls in enumerate(made)
        for position, (prompt, sampled) in enumerate(calls)
    ]


@given(episodes)
def test_the_calls_of_an_episode_are_one_path(
    made: list[list[tuple[list[int], list[int]]]],
) -> None:
    before = rows_of(made)
    after = concatenated(before)
    for number in range(len(made)):
        own = [row for row in after if row.episode_id == UUID(int=number)]
        whole = own[-1].ids
        assert all(whole[: len(row.ids)] == row.ids for row in own)
        assert computed_tokens(own) == len(whole) - 1
    assert [row.sampled_ids for row in after] == [row.sampled_ids for row in before]


@given(episodes)
def test_every_token_of_an_episode_has_the_same_weight_and_no_episode_more(
    made: list[list[tuple[list[int], list[int]]]],
) -> None:
    before = rows_of(made)
    after = concatenated(before)
    for number in range(len(made)):
        own = [row for row in after if row.episode_id == UUID(int=number)]
        assert sum(row.weight for row in own) == pytest.approx(1 / len(made))
        each = [row.weight / len(row.sampled_ids) for row in own]
        assert each == pytest.approx([each[0]] * len(own))


def test_a_conversation_that_grows_stays_as_it_is() -> None:
    made = rows_of([[([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6, 7])]])
    assert concatenated(made) == made


def test_another_agents_prompt_follows_what_it_never_saw() -> None:
    made = rows_of([[([1, 2], [3]), ([9, 2], [4]), ([1, 2, 3, 8], [5])]])
    one, two, three = concatenated(made)
    assert one == made[0]
    assert two.ids == (1, 2, 3, 9, 2, 4)
    assert (two.sampled_logprobs, two.recomputed) == ((), True)
    # Of its beginning what the sequence begins with; the rest is new.
    assert three.ids == (1, 2, 3, 9, 2, 4, 8, 5)


def test_the_updates_of_its_trainer_are_planned_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("training_rows", "imitated_rows"):
        monkeypatch.setattr(plan, name, getattr(plan, name))
    calls = (transition(tokens=tokens([1], [3])), transition(tokens=tokens([9], [4])))
    group = Group(
        task="t",
        episodes=(msgspec.structs.replace(episode(1.0), calls=calls), episode(0.0)),
    )
    claim = Claim(update_id=new_id(), policy="m", parent_version=0, groups=(group,))
    apart = plan.plan_update(claim, Recipe())
    _concatenate_updates()
    one = plan.plan_update(claim, Recipe())
    assert [row.prompt_ids for row in apart.rows[:2]] == [(1,), (9,)]
    assert [row.prompt_ids for row in one.rows[:2]] == [(1,), (1, 3, 9)]
    assert one.outcomes == apart.outcomes


def test_where_nothing_is_compared_nothing_is_computed_anew() -> None:
    made = rows_of([[([1], [3]), ([9], [4])]])
    imitated = [msgspec.structs.replace(row, sampled_logprobs=()) for row in made]
    assert not any(row.recomputed for row in concatenated(imitated))
