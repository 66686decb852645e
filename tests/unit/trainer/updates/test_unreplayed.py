"""Calls whose grammar cannot be replayed are left out, and all others are trained."""

from typing import Any

import msgspec

from store.ids import new_id
from store.records import Group, TransitionRow
from store.updates.claims import Claim
from tests.support.stored import episode, transition
from trainer.recipes.recipe import Recipe
from trainer.updates.plan import plan_update
from trainer.updates.unreplayed import calls_with_grammar, unreplayed_in, without_calls

SAMPLING = {"temperature": 1.0, "grammar": {"kind": "regex", "text": "a+"}}


def held(**changes: Any) -> TransitionRow:
    return transition(sampling=SAMPLING, **changes)


def claim(*calls: TransitionRow) -> Claim:
    first = msgspec.structs.replace(episode(1.0), calls=calls)
    group = Group(task="t", episodes=(first, episode(0.0)))
    return Claim(update_id=new_id(), policy="m", parent_version=3, groups=(group,))


def test_only_what_would_be_trained_is_looked_at() -> None:
    asked = claim(
        held(), transition(), held(trainable=False, reason="greedy"), held(policy="other")
    )
    assert calls_with_grammar(asked) == [asked.groups[0].episodes[0].calls[0]]


def test_such_calls_are_not_trained_and_all_others_are() -> None:
    asked = claim(held(), held(), transition())
    odd = {str(asked.groups[0].episodes[0].calls[0].id): "outside_grammar"}
    found = plan_update(asked, Recipe(), {}, odd)
    assert [one.reason for one in found.credited] == ["outside_grammar", None, None, None]
    assert sum(one.weight for one in found.credited) == 1.0
    assert unreplayed_in(found.metrics) == odd
    assert [row.distribution.grammar is None for row in found.rows] == [False, True, True]


def test_nothing_changes_where_all_can_be_replayed() -> None:
    asked = claim(held())
    assert without_calls(asked, {}) is asked
    plain = plan_update(asked, Recipe())
    assert "unreplayed_calls" not in plain.metrics
    assert unreplayed_in(plain.metrics) == {}
