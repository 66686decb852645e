"""The moving baseline: order-free, by family and agent, and what is made of it."""

import itertools
from math import sqrt

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.records import Episode, Group, ToolCall
from store.tenants import task_family
from tests.support.records import tool_event
from tests.support.stored import episode, transition
from trainer.credit.assign import UpdateCredit, assign_credit
from trainer.credit.moving import (
    MAX_FAMILIES,
    NO_MOVING_BASELINES,
    RATE,
    MovingAverage,
    MovingBaselines,
)
from trainer.recipes.recipe import CreditOptions

RULE = CreditOptions()
KNOWN = MovingBaselines(families={"t": {"": MovingAverage(mean=0.5, variance=0.25, count=100)}})


def credit(
    *episodes: Episode, before: MovingBaselines = NO_MOVING_BASELINES, rule: CreditOptions = RULE
) -> UpdateCredit:
    groups = [Group(task=one.task or "", episodes=(one,)) for one in episodes]
    return assign_credit(groups, rule, policy="m", oldest_version=0, baselines=before)


@pytest.mark.parametrize(
    ("task", "family"),
    [
        ("refunds/17", "refunds"),
        ("refunds:late/3", "refunds"),
        ("refunds-17", "refunds"),
        ("refunds", "refunds"),
        ("gsm8k #12", "gsm8k"),
        ("17", ""),
        ("", ""),
        (None, ""),
        ("/x", ""),
        ("prompt:0a1b", "prompt"),
    ],
)
def test_family_of_a_task_is_read_from_its_name(task: str | None, family: str) -> None:
    assert task_family(task) == family


def test_single_episode_is_compared_with_its_familys_moving_average() -> None:
    found = credit(episode(1.0, task="t/1"), episode(0.5, task="t/2"), before=KNOWN)
    # Both have the share 1 − 0.95² = 0.0975, and 0.75 for a mean.
    share = 0.0975
    mean = 0.5 + share * 0.25
    variance = (1 - share) * (0.25 + (0.25 * share) ** 2) + share * (
        0.25**2 + (0.25 * (1 - share)) ** 2
    )
    assert [c.advantage for c in found.transitions] == pytest.approx(
        [(1.0 - mean) / sqrt(variance), (0.5 - mean) / sqrt(variance)], abs=1e-12
    )
    assert [c.weight for c in found.transitions] == [0.5, 0.5]
    after = found.baselines.final_average("t", "")
    assert (after.mean, sqrt(after.variance)) == pytest.approx((mean, sqrt(variance)), abs=1e-12)


def test_new_family_is_compared_with_its_own_mean() -> None:
    found = credit(episode(1.0, task="t/1"), episode(0.0, task="t/2"))
    assert [c.advantage for c in found.transitions] == pytest.approx([1.0, -1.0], abs=1e-12)
    assert found.baselines.final_average("t", "").mean == 0.5


def test_members_of_groups_move_the_moving_baseline_too() -> None:
    group = Group(task="t/1", episodes=(episode(1.0), episode(0.0)))
    found = assign_credit([group], RULE, policy="m", oldest_version=0)
    after = found.baselines.final_average("t", "")
    assert (after.mean, after.count) == (0.5, 2)


def test_return_equal_to_its_baseline_is_no_signal() -> None:
    assert {
        c.reason for c in credit(episode(0.1, task="t/1"), episode(0.1, task="t/2")).transitions
    } == {"no_spread"}
    flat = MovingBaselines(families={"t": {"": MovingAverage(mean=0.1, variance=0.0, count=3)}})
    after = credit(episode(0.1), before=flat)
    assert after.transitions[0].reason == "no_spread"
    assert after.baselines.final_average("t", "").mean == 0.1


def test_each_agent_has_its_own_moving_baseline() -> None:
    both = MovingBaselines(
        families={
            "t": {
                "writer": MovingAverage(mean=0.25, variance=0.01, count=50),
                "checker": MovingAverage(mean=0.75, variance=0.01, count=50),
            }
        }
    )
    calls = (transition(agent="writer"), transition(agent="checker"), transition(agent="writer"))
    made = msgspec.structs.replace(episode(1.0), calls=calls)
    rule = CreditOptions(assignment="per_agent", normalisation="none")
    found = credit(made, before=both, rule=rule)
    assert [c.advantage for c in found.transitions] == pytest.approx(
        [0.95 * 0.75, 0.95 * 0.25, 0.95 * 0.75], abs=1e-12
    )
    mean = found.baselines.final_average("t", "writer").mean
    assert mean == pytest.approx(0.25 + 0.05 * 0.75, abs=1e-12)


def test_unscored_episodes_and_baseline_none_move_no_moving_baseline() -> None:
    assert credit(episode(None)).baselines == NO_MOVING_BASELINES
    assert (
        credit(episode(1.0), before=KNOWN, rule=CreditOptions(baseline="none")).baselines == KNOWN
    )


def tooled(reward: float, status: str, task: str) -> Episode:
    call = transition(
        tool_events=(tool_event(status, "t"),),
        tool_calls=(ToolCall(id="t", name="tool", arguments="{}"),),
    )
    return msgspec.structs.replace(episode(reward, task=task), calls=(call,))


def test_air_has_its_own_moving_average() -> None:
    before = msgspec.structs.replace(
        KNOWN, airs={"t": {"": MovingAverage(mean=0.1, variance=0.01, count=100)}}
    )
    found = credit(tooled(0.5, "ok", "t/1"), tooled(0.5, "malformed", "t/2"), before=before)
    # The final rewards are what was expected; AIR is 0.2 and -0.2, and has the weight ½. The spread
    # of the final rewards is below AIR_SPREAD: 0.9025 · 0.25 of what was, nothing new.
    mean = 0.1 + 0.0975 * (0.0 - 0.1)
    assert [c.advantage for c in found.transitions] == pytest.approx(
        [0.2 - mean, -0.2 - mean], abs=1e-12
    )
    assert found.baselines.air_average("t", "").mean == pytest.approx(mean, abs=1e-12)


def test_earlier_members_of_a_group_do_not_move_the_moving_baseline_again() -> None:
    group = Group(task="t", episodes=(episode(1.0),), earlier=(episode(0.0), episode(0.0)))
    found = assign_credit([group], RULE, policy="m", oldest_version=0, baselines=KNOWN)
    assert len(found.transitions) == 1
    assert found.baselines.final_average("t", "").count == 101


def test_average_of_few_returns_is_their_plain_mean() -> None:
    at = NO_MOVING_BASELINES
    for value in (1.0, 0.0, 0.0, 1.0, 0.5):
        at = at.updated({("t", "a"): [value]}, {})
    found = at.final_average("t", "a")
    assert (found.mean, found.variance) == pytest.approx((0.5, 1 / 5), abs=1e-12)


def test_update_moves_the_moving_baseline_by_the_mean_over_all_orders_of_its_returns() -> None:
    values = [1.0, 0.0, 0.25]
    one_by_one = []
    for order in itertools.permutations(values):
        mean = 0.5
        for value in order:
            mean += RATE * (value - mean)
        one_by_one.append(mean)
    found = KNOWN.updated({("t", ""): values}, {})
    assert found.final_average("t", "").mean == pytest.approx(sum(one_by_one) / 6, abs=1e-12)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=9), st.randoms(use_true_random=False))
def test_order_within_an_update_does_not_change_the_averages(
    values: list[float], random: object
) -> None:
    shuffled = list(values)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    for before in (NO_MOVING_BASELINES, KNOWN):
        first = before.updated({("t", ""): values}, {("u", "b"): values})
        again = before.updated({("t", ""): shuffled}, {("u", "b"): shuffled})
        assert msgspec.json.encode(first.pruned()) == msgspec.json.encode(again.pruned())


def test_task_families_that_never_come_again_are_forgotten_first() -> None:
    """They are compared with all of the policy's episodes."""
    often = credit(episode(1.0, task="often/1"), episode(0.0, task="often/2")).baselines
    once = [episode(1.0, task=f"once{number}x") for number in range(MAX_FAMILIES)]
    found = credit(*once, before=often)
    assert len(found.baselines.families) == MAX_FAMILIES
    assert found.baselines.final_average("often", "").mean == 0.5
    every = found.baselines.final_average("never", "")
    assert every.count == MAX_FAMILIES + 2
    assert {c.comparison.baseline for c in found.transitions if c.comparison} == {every.mean}
