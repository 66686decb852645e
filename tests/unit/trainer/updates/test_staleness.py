"""Staleness is measured: what an episode's tokens are worth under the policy."""

import math
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.claims import Claim
from store.ids import new_id
from store.records import Episode, Group
from tests.support.stored import episode, transition
from trainer.batches import Row, bare_row
from trainer.recipes.recipe import Recipe
from trainer.updates.plan import (
    LeftOut,
    effective_share,
    plan_update,
    shares_by_episode,
    smallest_in,
    too_far,
)

CAP = 2.0
LOG_RATIOS = st.lists(st.floats(min_value=-500.0, max_value=1e6), min_size=1, max_size=50)


@given(LOG_RATIOS)
def test_it_is_a_share_and_does_not_depend_on_order_or_length(log_ratios: list[float]) -> None:
    share = effective_share(log_ratios, CAP)
    assert 0.0 <= share <= 1.0 + 1e-9
    assert effective_share(log_ratios[::-1], CAP) == share
    assert effective_share(log_ratios * 7, CAP) == pytest.approx(share)


@given(st.lists(st.floats(min_value=-5.0, max_value=5.0), min_size=1, max_size=50))
def test_it_is_kishs_of_the_ratios_that_the_loss_takes(log_ratios: list[float]) -> None:
    weights = [min(CAP, math.exp(one)) for one in log_ratios]
    wanted = sum(weights) ** 2 / (len(weights) * sum(one**2 for one in weights))
    assert effective_share(log_ratios, CAP) == pytest.approx(wanted)


@given(st.integers(min_value=1, max_value=200), st.floats(min_value=-5.0, max_value=5.0))
def test_where_all_ratios_are_alike_nothing_is_lost(tokens: int, log_ratio: float) -> None:
    assert effective_share([log_ratio] * tokens, CAP) == pytest.approx(1.0)


def test_one_token_of_a_long_episode_does_not_decide_about_the_others() -> None:
    assert effective_share([0.0] * 999 + [50.0], CAP) > 0.99
    assert effective_share([0.0, -50.0, -50.0], CAP) == pytest.approx(1 / 3)


@given(LOG_RATIOS)
def test_however_large_the_cap_it_is_a_share(log_ratios: list[float]) -> None:
    assert 0.0 <= effective_share(log_ratios, 1e308) <= 1.0 + 1e-9


def test_what_the_policy_never_gives_is_worth_nothing() -> None:
    assert effective_share([-math.inf, -2000.0], CAP) == 0.0


def test_what_is_no_number_is_left_to_the_learner() -> None:
    share = effective_share([0.0, math.nan], CAP)
    assert math.isnan(share)
    assert too_far({UUID(int=1): share}, 0.5) == {}
    assert smallest_in({UUID(int=1): share}) == {}


def row(number: int, version: int, *logprobs: float) -> Row:
    made = bare_row(number, [1, 2], range(len(logprobs)))
    return msgspec.structs.replace(made, version=version, sampled_logprobs=logprobs)


def test_an_episode_is_measured_as_one() -> None:
    rows = [row(2, 2, -1.0, -1.0), row(2, 1, -1.0), row(3, 4, -2.0)]
    found = shares_by_episode(rows, [[-1.0, -60.0], [-60.0], [-2.0]], CAP)
    assert found == {UUID(int=2): pytest.approx(1 / 3), UUID(int=3): 1.0}
    assert set(too_far(found, 0.5)) == {UUID(int=2)}
    assert too_far(found, 0.0) == {}
    assert smallest_in(found) == {"smallest_effective_sample": pytest.approx(1 / 3)}


# The plan


def claim(*episodes: Episode) -> Claim:
    group = Group(task="t", episodes=episodes)
    return Claim(update_id=new_id(), policy="m", parent_version=3, groups=(group,))


def test_an_episode_that_is_too_far_counts_in_the_mean_and_is_not_trained() -> None:
    greedy = transition(trainable=False, reason="greedy")
    gone = msgspec.structs.replace(episode(1.0), calls=(transition(), greedy))
    held = claim(gone, episode(1.0), episode(0.0))
    found = plan_update(held, Recipe(), LeftOut(off_policy_episodes={gone.id: 0.25}))
    whole = plan_update(held, Recipe())
    assert [one.reason for one in found.outcomes] == ["off_policy", None, None]
    assert [one.reason for one in found.credited] == ["off_policy", "off_policy", None, None]
    kept = [one for one in whole.rows if one.episode_id != gone.id]
    assert [one.advantage for one in found.rows] == [one.advantage for one in kept]
    assert sum(one.weight for one in found.rows) == pytest.approx(1.0)
    assert found.metrics["dropped"] == {"off_policy": 1}
    assert LeftOut.recorded(found.metrics).off_policy_episodes == {gone.id: 0.25}
    assert "off_policy_episodes" not in whole.metrics


def test_what_is_dropped_is_no_signal() -> None:
    first, second = episode(1.0), episode(0.0)
    other = Group(task="u", episodes=(episode(1.0), episode(0.0)))
    held = msgspec.structs.replace(
        claim(first, second), groups=(*claim(first, second).groups, other)
    )
    far = LeftOut(off_policy_episodes={first.id: 0.1, second.id: 0.2})
    found = plan_update(held, Recipe.model_validate({"claim": {"groups": 2}}), far)
    assert (found.step_share, len(found.rows)) == (0.5, 2)
