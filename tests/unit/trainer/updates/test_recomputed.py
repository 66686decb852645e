"""Which calls wait for their version, and what becomes of those whose version is lost."""

from typing import Any

import msgspec

from store.ids import new_id
from store.records import Group, TransitionRow
from store.updates.claims import Claim
from tests.support.stored import episode, transition
from trainer.recipes.recipe import Recipe
from trainer.updates.plan import lost_in, plan_update
from trainer.updates.recomputed import (
    rows_to_compute,
    versions_to_ask,
    with_logprobs,
    without_versions,
)


def silent(version: int | None, **changes: Any) -> TransitionRow:
    told = transition(policy_version=version, **changes)
    bare = msgspec.structs.replace(told.tokens, sampled_logprobs=b"")
    return msgspec.structs.replace(told, tokens=bare)


def claim(*calls: TransitionRow) -> Claim:
    first = msgspec.structs.replace(episode(1.0), calls=calls)
    group = Group(task="t", episodes=(first, episode(0.0)), earlier=(first,))
    return Claim(update_id=new_id(), policy="m", parent_version=3, groups=(group,))


def test_only_what_would_be_trained_waits() -> None:
    asked = claim(
        silent(1),
        silent(None),
        silent(2, trainable=False, reason="greedy"),
        silent(4, policy="other"),
        transition(policy_version=5),
    )
    assert versions_to_ask(asked) == {0, 1}


def test_calls_of_a_lost_version_are_not_trained_and_all_others_are() -> None:
    asked = claim(silent(1), silent(2), transition(policy_version=1))
    found = plan_update(asked, Recipe(), {1: "version_gone"})
    assert [one.reason for one in found.credited] == ["version_gone", None, None, None]
    assert sum(one.weight for one in found.credited) == 1.0
    assert [row.recomputed for row in found.rows] == [True, False, False]
    assert found.metrics["lost_versions"] == {"1": "version_gone"}
    assert lost_in(found.metrics) == {1: "version_gone"}


def test_nothing_changes_where_no_version_is_lost() -> None:
    asked = claim(silent(1))
    assert without_versions(asked, {}) is asked
    plain = plan_update(asked, Recipe())
    assert "lost_versions" not in plain.metrics
    assert lost_in(plain.metrics) == {}
    assert plan_update(asked, Recipe(), {7: "version_gone"}).rows == plain.rows


def test_rows_are_computed_by_version_the_newest_first_and_get_their_own_values() -> None:
    rows = plan_update(claim(silent(1), silent(2), silent(1)), Recipe()).rows
    waiting = rows_to_compute(rows)
    assert [(version, len(own)) for version, own in waiting.items()] == [(2, 1), (1, 2)]
    values = {row.key: [-float(row.position)] * 2 for own in waiting.values() for row in own}
    found = with_logprobs(rows, values)
    assert [row.sampled_logprobs for row in found[:3]] == [(0.0, 0.0), (-1.0, -1.0), (-2.0, -2.0)]
    assert found[3:] == list(rows[3:])
    assert rows_to_compute(found) == {}
