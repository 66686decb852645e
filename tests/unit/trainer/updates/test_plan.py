"""An update's plan: rows, what becomes of each episode, and the figures told of it."""

from typing import Any

import msgspec
import pytest

from store.claims import Claim
from store.ids import new_id
from store.records import Episode, Group, ToolCall, ToolEvent, ToolStatus
from tests.support.stored import episode, transition
from trainer.recipes.recipe import CreditOptions, Recipe
from trainer.updates.claiming import claim_rule
from trainer.updates.plan import Plan, plan_update


def plan(*episodes: Episode, **credit: Any) -> Plan:
    group = Group(task="t", episodes=episodes)
    claim = Claim(update_id=new_id(), policy="m", parent_version=0, groups=(group,))
    return plan_update(claim, Recipe(credit=CreditOptions(**credit)))


def failed() -> Episode:
    broken = transition(http_status=400, trainable=False, reason="incomplete")
    return msgspec.structs.replace(episode(None), calls=(transition(), broken))


def test_each_episode_is_accounted_for_once() -> None:
    greedy = transition(trainable=False, reason="greedy")
    mixed = msgspec.structs.replace(episode(None), calls=(transition(), greedy))
    untrainable = msgspec.structs.replace(episode(0.5), calls=(greedy,))
    found = plan(episode(1.0), episode(0.0, 3), mixed, failed(), untrainable)
    assert [(one.trained, one.reason) for one in found.outcomes] == [
        (True, None),
        (True, None),
        (False, "unscored"),
        (False, "failed"),
        (False, "no_trainable_call"),
    ]
    assert len(found.rows) == 4
    assert found.metrics["dropped"] == {"unscored": 1, "failed": 1, "no_trainable_call": 1}


def test_means_are_over_episodes() -> None:
    found = plan(episode(1.0, 5), episode(0.0, 1)).metrics
    assert (found["reward_mean"], found["total_mean"], found["air_mean"]) == (0.5, 0.5, 0.0)
    assert found["trained_episodes"] == 2


def of_groups(*groups: tuple[float, ...], **claim: int) -> Plan:
    made = tuple(
        Group(task=f"t{number}", episodes=tuple(map(episode, rewards)))
        for number, rewards in enumerate(groups)
    )
    held = Claim(update_id=new_id(), policy="m", parent_version=0, groups=made)
    return plan_update(held, Recipe.model_validate({"claim": claim}))


def test_an_update_of_less_signal_takes_a_step_that_is_smaller_by_as_much() -> None:
    found = of_groups((1.0, 0.0), (1.0, 1.0), (0.0, 0.5), groups=8)
    assert (found.metrics["groups"], found.metrics["signal_groups"]) == (3, 2)
    assert found.step_share == found.metrics["step_share"] == 0.25


def test_no_update_takes_more_than_a_whole_step() -> None:
    assert of_groups((1.0, 0.0), (1.0, 0.5), (0.0, 0.5), groups=2).step_share == 1.0


def with_tool(reward: float, status: ToolStatus) -> Episode:
    call = transition(
        tool_calls=(ToolCall(id="c1", name="search", arguments="{}"),),
        tool_events=(ToolEvent(id=new_id(), tool_id="c1", name="search", status=status),),
    )
    return msgspec.structs.replace(episode(reward), calls=(call,))


def test_a_group_whose_tools_alone_differ_counts_for_what_air_weighs() -> None:
    """What is left once a policy has learned its tasks: the noise of tools."""
    noisy = Group(task="t", episodes=(with_tool(1.0, "ok"), with_tool(1.0, "error")))
    held = Claim(update_id=new_id(), policy="m", parent_version=0, groups=(noisy,) * 8)
    found = plan_update(held, Recipe.model_validate({"claim": {"groups": 8}}))
    assert found.metrics["trained_episodes"] > 0
    # λ 0.2 against a spread of 0.5.
    assert found.step_share == pytest.approx(0.4)


def test_of_groups_of_one_each_episode_counts() -> None:
    group = Group(task="t", episodes=(episode(1.0), episode(0.0), episode(None)))
    held = Claim(update_id=new_id(), policy="m", parent_version=0, groups=(group,))
    recipe = Recipe.model_validate(
        {"claim": {"group_size": 1, "groups": 8}, "credit": {"baseline": "moving"}}
    )
    assert plan_update(held, recipe).step_share == 0.25


@pytest.mark.parametrize(
    ("credit", "needed"),
    [
        ({}, True),
        ({"baseline": "leave_one_out"}, True),
        ({"baseline": "none"}, False),
        ({"baseline": "moving"}, False),
        ({"assignment": "call"}, False),
    ],
)
def test_groups_must_differ_where_they_are_compared_by_what_the_store_knows(
    credit: dict[str, Any], needed: bool
) -> None:
    rule = claim_rule(Recipe(credit=CreditOptions.model_validate(credit)), "m")
    assert rule.needs_spread is needed


def test_what_another_policy_sampled_is_not_trained_and_makes_nobody_stale() -> None:
    """A checker that stays on the base model, beside a writer that is trained."""
    calls = (
        transition(policy_version=5),
        transition(policy="base", policy_version=0, agent="checker"),
    )
    made = msgspec.structs.replace(episode(1.0), calls=calls)
    other = msgspec.structs.replace(episode(0.0), calls=(transition(policy_version=5),))
    group = Group(task="t", episodes=(made, other))
    claim = Claim(
        update_id=new_id(), policy="m", parent_version=5, oldest_version=3, groups=(group,)
    )
    found = plan_update(claim, Recipe())
    assert [(one.reason, one.weight) for one in found.credited] == [
        (None, 0.5),
        ("other_policy", 0.0),
        (None, 0.5),
    ]
    assert [row.version for row in found.rows] == [5, 5]
