"""Credit by hand: returns, AIR, advantages over episodes, weights that do not count calls."""

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.records import Episode, Group, ToolCall, ToolEvent
from store.values.rewards import newest
from tests.support.records import tool_event
from tests.support.stored import episode, said, transition
from trainer.batches import training_rows
from trainer.credit.assign import assign_credit
from trainer.recipes.recipe import CreditOptions

RULE = CreditOptions()


def credit(*episodes: Episode, oldest: int = 0, rule: CreditOptions = RULE) -> Any:
    group = Group(task="t", episodes=episodes)
    return assign_credit([group], rule, policy="m", oldest_version=oldest).transitions


def with_events(made: Episode, *statuses: str) -> Episode:
    events: tuple[ToolEvent, ...] = tuple(
        tool_event(status, str(i)) for i, status in enumerate(statuses)
    )
    asked = tuple(
        ToolCall(id=str(i), name="tool", arguments=f'{{"n": {i}}}') for i in range(len(statuses))
    )
    first = msgspec.structs.replace(made.calls[0], tool_events=events, tool_calls=asked)
    return msgspec.structs.replace(made, calls=(first, *made.calls[1:]))


def test_hand_computed_group() -> None:
    found = credit(episode(1.0), episode(0.0), episode(0.0), episode(0.0))
    # mean 0.25, s = sqrt((0.75² + 3·0.25²) / 3) = 0.5
    assert [c.advantage for c in found] == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-12)
    assert [c.weight for c in found] == [0.25] * 4


def test_the_number_of_calls_changes_neither_advantage_nor_total_weight() -> None:
    few = credit(episode(1.0, 1), episode(0.0, 1))
    many = credit(episode(1.0, 20), episode(0.0, 3))
    assert {c.advantage for c in few} == {c.advantage for c in many}
    assert sum(c.weight for c in many[:20]) == pytest.approx(0.5, abs=1e-12)
    assert sum(c.weight for c in many[20:]) == pytest.approx(0.5, abs=1e-12)


def test_a_small_spread_is_not_blown_up() -> None:
    found = credit(episode(0.0), episode(0.01))
    assert [c.advantage for c in found] == pytest.approx([-0.05, 0.05], abs=1e-12)


def test_unscored_is_not_zero_and_failed_is_not_unscored() -> None:
    broken = episode(None, calls=1)
    broken = msgspec.structs.replace(
        broken, calls=(transition(http_status=400, trainable=False, reason="incomplete"),)
    )
    found = credit(episode(1.0), episode(0.0), episode(None), broken)
    assert [c.reason for c in found] == [None, None, "unscored", "failed"]
    assert found[0].advantage == pytest.approx(2**-0.5, abs=1e-12)
    punished = credit(
        episode(1.0), episode(0.0), broken, rule=RULE.model_copy(update={"failed_reward": -1.0})
    )
    assert [c.r_final for c in punished] == [1.0, 0.0, -1.0]
    assert punished[2].reason == "no_trainable_call"


def test_groups_without_signal_are_not_trained() -> None:
    assert {c.reason for c in credit(episode(1.0), episode(1.0))} == {"no_spread"}
    assert {c.reason for c in credit(episode(1.0))} == {"alone"}


def test_stale_and_untrainable_episodes_still_count_in_the_baseline() -> None:
    old = episode(0.0)
    fresh = msgspec.structs.replace(episode(1.0), calls=(transition(policy_version=5),))
    found = credit(old, fresh, oldest=3)
    assert [c.reason for c in found] == ["stale", None]
    assert found[1].weight == 1.0
    assert found[1].advantage == pytest.approx(2**-0.5, abs=1e-12)


def test_an_untrainable_call_of_a_trained_episode_keeps_its_reason() -> None:
    mixed = msgspec.structs.replace(
        episode(1.0), calls=(transition(), transition(trainable=False, reason="greedy"))
    )
    found = credit(mixed, episode(0.0))
    assert [c.reason for c in found] == [None, "greedy", None]
    assert [c.weight for c in found] == [0.5, 0.0, 0.5]


def air(*statuses: str) -> float:
    return credit(with_events(episode(0.0), *statuses))[0].r_air  # type: ignore[no-any-return]


def test_air_is_bounded_and_malformed_scores_below_a_clean_failure() -> None:
    assert (air("ok"), air("error"), air("malformed")) == (0.2, -0.1, -0.2)
    assert air(*["ok"] * 100) == 0.2
    assert air() == 0.0


def test_air_and_final_reward_are_kept_apart_and_added() -> None:
    found = credit(with_events(episode(0.0), "ok"), with_events(episode(0.0), "malformed"))
    assert [(c.r_final, c.r_air, c.r_total) for c in found] == [(0.0, 0.2, 0.2), (0.0, -0.2, -0.2)]
    assert found[0].advantage == -found[1].advantage


def test_the_newest_reward_stands_in_any_order() -> None:
    statements = [said(0.1, 1), said(0.9, 3), said(0.5, 2), said(7, 9, "other")]
    for order in itertools.permutations(statements):
        counts = newest(order, "reward")
        assert counts is not None
        assert counts.value == 0.9


@given(
    st.lists(st.floats(-10, 10), min_size=2, max_size=12), st.lists(st.integers(1, 5), min_size=12)
)
def test_weights_of_an_update_sum_to_one(rewards: list[float], calls: list[int]) -> None:
    made = [episode(r, calls[i]) for i, r in enumerate(rewards)]
    found = credit(*made)
    rows = training_rows(found)
    if len(set(rewards)) == 1:
        assert rows == []
    else:
        assert sum(c.weight for c in found) == pytest.approx(1.0, abs=1e-9)
        assert sum(row.advantage * row.weight * calls[0] for row in rows[: calls[0]]) is not None
        shares = {c.episode: 0.0 for c in found}
        for c in found:
            shares[c.episode] += c.weight * (c.advantage or 0)
        assert sum(shares.values()) == pytest.approx(0.0, abs=1e-6)


def test_late_members_are_compared_with_what_was_spent_before() -> None:
    late = Group(task="t", episodes=(episode(1.0),), earlier=(episode(0.0), episode(0.0)))
    [found] = assign_credit([late], RULE, policy="m", oldest_version=0).transitions
    # mean ⅓, s = √⅓
    assert found.advantage == pytest.approx(2 * 3**-0.5, abs=1e-12)
    assert (found.weight, found.reason) == (1.0, None)


def test_episodes_without_a_task_are_compared_with_nobody() -> None:
    group = Group(task="", episodes=(episode(1.0), episode(0.0)))
    found = assign_credit([group], RULE, policy="m", oldest_version=0).transitions
    assert {c.reason for c in found} == {"alone"}
