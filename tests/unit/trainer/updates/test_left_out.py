"""Calls that cannot be computed are left out of a plan; all others are trained."""

from typing import Any

import msgspec
import pytest

from store.claims import Claim
from store.ids import new_id
from store.records import Group, TransitionRow
from tests.support.stored import episode, transition
from trainer.recipes.recipe import Recipe
from trainer.updates.plan import (
    LeftOut,
    calls_with_grammar,
    plan_update,
    rows_to_compute,
    versions_to_ask,
    with_logprobs,
)

SAMPLING = {"temperature": 1.0, "grammar": {"kind": "regex", "text": "a+"}}


def silent(version: int | None, **changes: Any) -> TransitionRow:
    """A call without log-probabilities."""
    made = transition(policy_version=version, **changes)
    return msgspec.structs.replace(
        made, tokens=msgspec.structs.replace(made.tokens, sampled_logprobs=b"")
    )


def held(**changes: Any) -> TransitionRow:
    """A call that a grammar held."""
    return transition(sampling=SAMPLING, **changes)


def claim(*calls: TransitionRow) -> Claim:
    first = msgspec.structs.replace(episode(1.0), calls=calls)
    group = Group(task="t", episodes=(first, episode(0.0)), earlier=(first,))
    return Claim(update_id=new_id(), policy="m", parent_version=3, groups=(group,))


def test_only_calls_that_would_be_trained_wait_for_their_version() -> None:
    asked = claim(
        silent(1),
        silent(None),
        silent(2, trainable=False, reason="greedy"),
        silent(4, policy="other"),
        transition(policy_version=5),
    )
    assert versions_to_ask(asked) == {0, 1}


def test_only_calls_that_would_be_trained_have_their_grammar_replayed() -> None:
    asked = claim(
        held(), transition(), held(trainable=False, reason="greedy"), held(policy="other")
    )
    assert calls_with_grammar(asked) == [asked.groups[0].episodes[0].calls[0]]


def test_calls_of_a_lost_version_are_not_trained_and_all_others_are() -> None:
    asked = claim(silent(1), silent(2), transition(policy_version=1))
    left_out = LeftOut(lost_versions={1: "version_gone"})
    plan = plan_update(asked, Recipe(), left_out)
    assert [credit.reason for credit in plan.credited] == ["version_gone", None, None, None]
    assert sum(credit.weight for credit in plan.credited) == 1.0
    assert [row.recomputed for row in plan.rows] == [True, False, False]
    assert plan.metrics["lost_versions"] == {"1": "version_gone"}
    assert LeftOut.recorded(plan.metrics) == left_out


def test_calls_outside_their_grammar_are_not_trained_and_all_others_are() -> None:
    asked = claim(held(), held(), transition())
    odd = {str(asked.groups[0].episodes[0].calls[0].id): "outside_grammar"}
    plan = plan_update(asked, Recipe(), LeftOut(unreplayed_calls=odd))
    assert [credit.reason for credit in plan.credited] == ["outside_grammar", None, None, None]
    assert sum(credit.weight for credit in plan.credited) == 1.0
    assert plan.metrics["unreplayed_calls"] == odd
    assert [row.distribution.grammar is None for row in plan.rows] == [False, True, True]


@pytest.mark.parametrize("call", [silent(1), held()])
def test_plan_records_nothing_where_nothing_is_left_out(call: TransitionRow) -> None:
    asked = claim(call)
    plan = plan_update(asked, Recipe())
    assert not plan.metrics.keys() & set(LeftOut.__struct_fields__)
    assert LeftOut.recorded(plan.metrics) == LeftOut()
    other = LeftOut(lost_versions={7: "version_gone"}, unreplayed_calls={"other": "outside"})
    assert plan_update(asked, Recipe(), other).rows == plan.rows


def test_rows_are_computed_by_version_the_newest_first_and_get_their_own_values() -> None:
    rows = plan_update(claim(silent(1), silent(2), silent(1)), Recipe()).rows
    waiting = rows_to_compute(rows)
    assert [(version, len(own)) for version, own in waiting.items()] == [(2, 1), (1, 2)]
    values = {row.key: [-float(row.position)] * 2 for own in waiting.values() for row in own}
    made = with_logprobs(rows, values)
    assert [row.sampled_logprobs for row in made[:3]] == [(0.0, 0.0), (-1.0, -1.0), (-2.0, -2.0)]
    assert made[3:] == list(rows[3:])
    assert rows_to_compute(made) == {}
