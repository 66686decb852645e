"""`benchmarks.durations`: a small day, whose figures are the same for the same seed."""

import pytest

from benchmarks.durations.day import BEFORE, Day, Machine, Rules, rules_now, run_day, worth_after
from benchmarks.durations.figures import Found, bars, figures, tables
from benchmarks.durations.load import Load, make_episodes
from trainer.recipes.recipe import load_recipe

RECIPE = load_recipe("default")
# As dense as a day of 100,000 episodes, and a quarter as long.
LOAD = Load(episodes=24_000, seconds=21_600.0)
SLOTS = 8
NOW = rules_now(RECIPE, SLOTS)
USUAL = Machine()


def simulated(rules: Rules, machine: Machine = USUAL) -> tuple[Day, Found]:
    day = run_day(LOAD, machine, rules, RECIPE, seed=1)
    return day, figures(day, LOAD, rules.name, rules.slots)


@pytest.fixture(scope="module")
def now() -> tuple[Day, Found]:
    return simulated(NOW)


def test_trained_shares_are_equal_across_durations_and_slots_are_enough(
    now: tuple[Day, Found],
) -> None:
    _, found = now
    assert found.apart <= 0.1
    assert found.most_live <= SLOTS
    assert min(one.trained for one in found.buckets) > 0.3
    assert all(bar.holds for bar in bars([found]))


def test_half_an_hour_scored_ten_minutes_late_is_trained(now: tuple[Day, Found]) -> None:
    day, _ = now
    late = [
        one
        for one in day.episodes
        if one.length > 1500.0 and one.scored - one.ended > 500.0 and one.scored < 18_000.0
    ]
    share = sum(one.fate == "trained" for one in late) / len(late)
    assert share > 0.3


def test_the_rules_before_trained_the_short_ones_alone() -> None:
    _, found = simulated(BEFORE)
    assert found.apart > 0.1
    assert found.buckets[-1].trained < 0.02
    assert found.most_live > SLOTS


def test_a_policy_that_moves_far_leaves_out_what_it_moved_away_from() -> None:
    day, _ = simulated(NOW, Machine(divergence=0.2))
    cap, least = RECIPE.off_policy.ratio_cap, NOW.min_effective_sample
    trained = {one.lag for one in day.episodes if one.fate == "trained"}
    dropped = {one.lag for one in day.episodes if one.fate == "off_policy"}
    assert dropped
    assert all(worth_after(lag, 0.2, cap) >= least for lag in trained)
    assert all(worth_after(lag, 0.2, cap) < least for lag in dropped)


def test_the_same_seed_gives_the_same_day(now: tuple[Day, Found]) -> None:
    _, first = now
    _, again = simulated(NOW)
    assert first == again
    assert [table.heads for table in tables([first])] == [table.heads for table in tables([again])]


def test_episodes_are_as_the_load_says() -> None:
    made = make_episodes(LOAD, 0)
    assert len(made) == LOAD.episodes
    assert all(LOAD.shortest_s <= one.length <= LOAD.longest_s for one in made)
    assert all(0.0 <= one.scored - one.ended <= LOAD.latest_s for one in made)
    assert [one.begun for one in made] == sorted(one.begun for one in made)
