"""The plan of an update that imitates: its rows, what becomes of the others, and its step."""

from typing import Any

import msgspec
import pytest

from store.claims import Claim
from store.ids import new_id
from store.records import Episode, Group, Tokens, TransitionRow
from tests.support.records import tokens
from tests.support.stored import episode, transition
from trainer.batches import PLAIN
from trainer.recipes.recipe import Recipe
from trainer.updates.claiming import claim_rule
from trainer.updates.plan import Plan, plan_update

CREDIT = {"baseline": "none", "normalisation": "none"}


def recipe(**tables: Any) -> Recipe:
    credit = CREDIT | tables.pop("credit", {})
    return Recipe.model_validate({"learner": "sft", "credit": credit} | tables)


def plan(*groups: tuple[Episode, ...], **tables: Any) -> Plan:
    made = tuple(Group(task=f"t{number}", episodes=own) for number, own in enumerate(groups))
    claim = Claim(update_id=new_id(), policy="m", parent_version=0, groups=made)
    return plan_update(claim, recipe(**tables))


def of_calls(reward: float, *calls: TransitionRow) -> Episode:
    return msgspec.structs.replace(episode(reward), calls=calls)


def untrainable(reason: str, **changes: Any) -> TransitionRow:
    return transition(trainable=False, reason=reason, sampling={"temperature": 0.0}, **changes)


def test_each_episode_is_trained_or_says_why_not() -> None:
    found = plan(
        (episode(1.0), episode(0.0), episode(2.0), episode(None)), sft={"most_per_task": 1}
    )
    assert [one.reason for one in found.outcomes] == ["not_best", "low_reward", None, "unscored"]
    assert found.metrics["dropped"] == {"not_best": 1, "low_reward": 1, "unscored": 1}
    assert (found.metrics["episodes"], found.metrics["trained_episodes"]) == (4, 1)
    assert [row.weight for row in found.rows] == [1.0]


def test_a_group_of_successes_alone_is_trained() -> None:
    """No episode is compared with another: there is no spread to wait for."""
    found = plan((episode(1.0), episode(1.0)), (episode(1.0),))
    assert [one.trained for one in found.outcomes] == [True] * 3
    assert sum(row.weight for row in found.rows) == pytest.approx(1.0)


def test_an_update_without_a_success_makes_no_version() -> None:
    found = plan((episode(0.0), episode(0.9)))
    assert found.rows == ()
    assert found.metrics["dropped"] == {"low_reward": 2}


def test_its_step_is_as_large_as_the_groups_with_a_success() -> None:
    found = plan(
        (episode(1.0), episode(0.0)), (episode(0.0),), (episode(1.0),), claim={"groups": 8}
    )
    assert found.step_share == found.metrics["step_share"] == 0.25


def test_of_groups_of_one_each_success_counts() -> None:
    made = tuple(episode(value) for value in (1.0, 0.0, 1.0))
    found = plan(made, claim={"group_size": 1, "groups": 8})
    assert found.step_share == 0.25


def test_what_the_rows_were_sampled_from_makes_no_difference() -> None:
    cold = transition(sampling={"temperature": 0.3, "top_p": 0.5})
    silent = transition(
        tokens=msgspec.structs.replace(tokens([1, 2], [3, 4]), sampled_logprobs=b"")
    )
    found = plan((of_calls(1.0, cold, silent),))
    assert [(row.distribution, row.sampled_logprobs) for row in found.rows] == [(PLAIN, ())] * 2
    assert not any(row.recomputed for row in found.rows)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (untrainable("greedy"), None),
        (untrainable("constrained_sampling"), None),
        (untrainable("reshaped_distribution"), "reshaped_distribution"),
        (untrainable("unreadable_sampling"), "unreadable_sampling"),
        (untrainable("not_text"), "not_text"),
        # A checker's, an outside model's, and a fixed policy's are nobody's of this policy.
        (untrainable("greedy", policy="checker"), "greedy"),
        (untrainable("greedy", policy=None, policy_version=None), "greedy"),
        (untrainable("greedy", policy_version=None), "greedy"),
        (untrainable("greedy", tokens=Tokens()), "greedy"),
    ],
)
def test_calls_are_trained_whose_ratio_alone_is_unknown(
    call: TransitionRow, reason: str | None
) -> None:
    found = plan((of_calls(1.0, call, transition()),))
    assert [credit.reason for credit in found.credited] == [reason, None]
    assert len(found.rows) == (2 if reason is None else 1)
    compared = Claim(
        update_id=new_id(),
        policy="m",
        parent_version=0,
        groups=(Group(task="t", episodes=(of_calls(1.0, call), episode(0.0))),),
    )
    assert len(plan_update(compared, Recipe()).rows) == 1


def test_a_greedy_call_of_a_version_that_is_too_old_is_stale() -> None:
    made = of_calls(1.0, untrainable("greedy", policy_version=2))
    claim = Claim(
        update_id=new_id(),
        policy="m",
        parent_version=9,
        oldest_version=3,
        groups=(Group(task="t", episodes=(made,)),),
    )
    assert [one.reason for one in plan_update(claim, recipe()).outcomes] == ["stale"]


def test_an_update_waits_for_successes_and_not_for_spread() -> None:
    rule = claim_rule(recipe(sft={"min_reward": 0.5}), "m")
    assert (rule.needs_spread, rule.least_reward) == (False, 0.5)
    assert claim_rule(Recipe(), "m").least_reward is None
    # What single calls were given is not known in the store.
    assert claim_rule(recipe(credit={"assignment": "call"}), "m").least_reward is None
