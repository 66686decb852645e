"""One comparison: verdicts with bounded error, guards, pairs of tasks, and a canary's share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import nan
from random import Random
from typing import Literal

import msgspec
import pytest

from controller.comparison import (
    LEAST_SHARE,
    MOST_SHARE,
    TRIAL_INFORMATION,
    ComparedEpisode,
    Comparison,
    canary_share,
)
from trainer.recipes.recipe import PublishMode, PublishOptions

RULE = PublishOptions()


@dataclass(frozen=True)
class Case:
    """Say what episodes of a version are like, and what the comparison is to say of it."""

    name: str
    new: Callable[[Random], ComparedEpisode]
    kind: str | None
    reason: str = ""


def scored(mean: float, **values: object) -> Callable[[Random], ComparedEpisode]:
    """Return what draws episodes of one family with rewards of 0 or 1."""

    def draw(random: Random) -> ComparedEpisode:
        reward = float(random.random() < mean)
        return msgspec.structs.replace(ComparedEpisode("one", reward, seconds=1.0), **values)

    return draw


def sometimes(share: float, **values: object) -> Callable[[Random], ComparedEpisode]:
    """Return what draws equal episodes of which this share goes wrong."""

    def draw(random: Random) -> ComparedEpisode:
        good = scored(0.5)(random)
        return msgspec.structs.replace(good, **values) if random.random() < share else good

    return draw


OLD = scored(0.5, malformed=False)
CASES = (
    Case("better", scored(0.8, malformed=False), "better", "at most 0.05 lower"),
    Case("worse", scored(0.2, malformed=False), "worse", "scores lower"),
    Case("fails", sometimes(0.4, reward=None, failed=True), "worse", ""),
    Case("calls tools badly", scored(0.9, malformed=True), "worse", "malformed tool calls"),
    Case("slow", scored(0.9, seconds=3.0), "worse", "slow episodes"),
    Case("unscored", scored(0.5, reward=None), None),
)


def compared(
    case: Callable[[Random], ComparedEpisode],
    *,
    episodes: int = 1_500,
    watches: bool = False,
    share: float = 0.5,
) -> Comparison:
    random = Random(7)
    comparison = Comparison(RULE, new_share=share, old_share=1 - share, watches=watches)
    for _ in range(episodes):
        is_new = random.random() < share
        comparison.add(is_new, (case if is_new else OLD)(random))
    return comparison


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("watches", [False, True])
def test_comparison_of_live_episodes_reaches_the_expected_verdict_and_reason(
    case: Case, watches: bool
) -> None:
    """A watch calls nothing better: its control moves on."""
    verdict = compared(case.new, watches=watches).verdict
    kind, reason = (None, "") if watches and case.kind == "better" else (case.kind, case.reason)
    assert (verdict and verdict.kind) == kind
    assert reason in (verdict.reason if verdict else "")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_comparison_of_paired_tasks_reaches_the_same_verdicts(case: Case) -> None:
    random, comparison = Random(3), Comparison(RULE)
    for _ in range(400):
        comparison.add_pair(*[[draw(random) for _ in range(4)] for draw in (case.new, OLD)])
    assert (comparison.verdict and comparison.verdict.kind) == case.kind


@pytest.mark.parametrize("effect", [0.0, -RULE.margin])
def test_rate_of_wrong_verdicts_stays_within_its_limit_despite_continuous_checks(
    effect: float,
) -> None:
    wrong = {0.0: "worse", -RULE.margin: "better"}[effect]
    runs, mistakes = 200, 0
    for run in range(runs):
        random, comparison = Random(f"{effect} {run}"), Comparison(RULE)
        for _ in range(400):
            is_new = random.random() < 0.5
            comparison.add(is_new, scored(0.5 + effect * is_new)(random))
        mistakes += comparison.verdict is not None and comparison.verdict.kind == wrong
    assert mistakes <= RULE.mistakes * runs


def followed(*phases: tuple[int, int, float, float], share: float = 0.9) -> Comparison:
    """Watch phases of so many episodes of a version, with its mean reward and its control's."""
    random, comparison = (
        Random(1),
        Comparison(RULE, new_share=share, old_share=1 - share, watches=True),
    )
    for _ in range(200):
        comparison.add_past(scored(0.8)(random))
    for count, version, mean, control in phases:
        for _ in range(count):
            is_new = random.random() < share
            one = scored(mean if is_new else control, version=version * is_new)(random)
            comparison.add(is_new, one)
    return comparison


def test_watch_finds_a_version_worse_than_its_predecessors() -> None:
    """The predecessors beat the control, which proves nothing for the versions after them."""
    assert followed((2_000, 1, 0.9, 0.5)).verdict is None
    verdict = followed((2_000, 1, 0.9, 0.5), (2_000, 2, 0.2, 0.5)).verdict
    assert verdict is not None
    assert verdict.kind == "worse"


@pytest.mark.parametrize(
    ("second", "moves_to"), [(0.8, 1), (0.5, None)], ids=["in line", "falls behind"]
)
def test_control_moves_on_to_a_version_with_half_of_the_evidence_after_it(
    second: float, moves_to: int | None
) -> None:
    """Evidence of several versions together decides; none of these has enough of its own."""
    assert followed((400, 1, 0.8, 0.7)).next_control is None
    comparison = followed((500, 1, 0.8, 0.7), (200, 2, second, 0.7), (100, 3, second, 0.7))
    assert comparison.verdict is None
    assert comparison.next_control == moves_to


def test_fall_of_rewards_below_their_own_past_is_detected_before_a_verdict() -> None:
    assert followed((1_000, 1, 0.8, 0.8)).fall is None
    comparison = followed((1_000, 1, 0.8, 0.8), (150, 2, 0.5, 0.8))
    assert comparison.fall == pytest.approx(0.3, abs=0.12)
    assert comparison.verdict is None
    assert not comparison.may_move_control


@pytest.mark.parametrize(("tries", "falls"), [(1, True), (8, False)])
def test_unlucky_tasks_are_no_fall_however_often_each_is_tried(tries: int, falls: bool) -> None:
    """The rewards fall from 0.6 to 0.25 in 64 episodes: a fall for 64 tasks, chance for eight."""
    tasks = [number % 5 < 3 for number in range(50)] + [number % 4 == 0 for number in range(8)]
    comparison = Comparison(RULE, watches=True)
    for episode, reward in enumerate(reward for reward in tasks for _ in range(8)):
        comparison.add(True, ComparedEpisode("one", float(reward), task=f"one/{episode // tries}"))
    assert (comparison.fall is not None) is falls


def test_failed_episodes_of_an_outage_are_no_fall_of_rewards() -> None:
    comparison, failed = followed((1_000, 1, 0.8, 0.8)), ComparedEpisode("one", None, failed=True)
    for _ in range(500):
        comparison.add(True, failed)
    assert comparison.fall is None


@pytest.mark.parametrize(
    ("undecided", "means", "trade", "verdict"),
    [
        ("promote", {"a": 0.8, "b": 0.2}, "tasks 'b'", None),
        ("keep", {"a": 0.8, "b": 0.2}, "tasks 'b'", "worse"),
        ("keep", {"a": 0.95, "b": 0.3}, None, None),
    ],
)
@pytest.mark.parametrize("watches", [False, True])
def test_trade_off_between_task_families_is_found_and_judged(
    undecided: Literal["promote", "keep"],
    means: Mapping[str, float],
    trade: str | None,
    verdict: str | None,
    watches: bool,
) -> None:
    """Of every eight tasks seven are of the family that gains, so that the mean rises."""
    random = Random(3)
    comparison = Comparison(PublishOptions(undecided=undecided), watches=watches)
    for episode in range(6_000):
        family, is_new = "b" if episode % 8 == 0 else "a", random.random() < 0.5
        mean = means[family] if is_new else {"a": 0.5, "b": 0.6}[family]
        comparison.add(is_new, ComparedEpisode(family, float(random.random() < mean)))
    assert (trade or "None") in str(comparison.trade)
    found = comparison.verdict and comparison.verdict.kind
    assert found == verdict or (not watches and found == "better")
    assert {one.name for one in comparison.figures().families} == {"a", "b"}


def test_simultaneous_fall_of_both_arms_does_not_make_the_serving_version_worse() -> None:
    random, comparison = Random(2), Comparison(RULE, watches=True)
    for episode in range(4_000):
        is_new = random.random() < 0.9
        comparison.add(is_new, scored(0.9 if episode < 2_000 else 0.1)(random))
    assert comparison.verdict is None or comparison.verdict.kind == "better"


def test_verdict_of_a_trial_is_final() -> None:
    comparison = compared(scored(0.9))
    verdict = comparison.verdict
    assert verdict is not None
    for _ in range(500):
        comparison.add(True, ComparedEpisode("one", 0.0))
        comparison.add(False, ComparedEpisode("one", 1.0))
    assert comparison.verdict == verdict


def test_promotion_waits_while_a_guards_evidence_is_against_the_canary() -> None:
    """Rewards suffice long before failures of a fifth are shown to be more than of a tenth."""
    random, comparison = Random(5), Comparison(RULE)
    while comparison.figures().better < comparison.figures().better_needed:
        is_new = random.random() < 0.5
        failed = is_new and random.random() < 0.3
        comparison.add(is_new, ComparedEpisode("one", 1.0 if is_new else 0.0, failed=failed))
    assert comparison.verdict is None
    assert comparison.figures().guards[0].against > 1


@pytest.mark.parametrize(
    ("mode", "new", "harmful"),
    [
        ("evaluated", 0.49, True),
        ("evaluated", 0.5, False),
        ("canary", 0.48, False),
        ("canary", 0.47, True),
    ],
)
def test_reward_deficit_of_a_canary_points_to_harm_only_from_half_the_margin_on(
    mode: PublishMode, new: float, harmful: bool
) -> None:
    comparison = Comparison(PublishOptions(mode=mode))
    comparison.add_pair([ComparedEpisode("one", new)], [ComparedEpisode("one", 0.5)])
    assert comparison.points_to_harm == harmful


def test_rewards_out_of_range_are_clipped_and_counted() -> None:
    comparison = Comparison(PublishOptions(reward_range=(0.0, 2.0), margin=0.1))
    comparison.add_pair(
        [ComparedEpisode("one", 5.0)], [ComparedEpisode("one", -1.0), ComparedEpisode("one", 1.0)]
    )
    figures = comparison.figures()
    assert (figures.new.mean, figures.new.clipped) == (2.0, 1)
    assert (figures.old.mean, figures.old.clipped) == (0.5, 1)
    assert figures.difference == 1.5


def test_failed_episode_counts_as_lowest_reward_and_unscored_is_ignored() -> None:
    comparison = Comparison(RULE)
    comparison.add_pair([ComparedEpisode("one", None, failed=True)], [ComparedEpisode("one", 1.0)])
    comparison.add_pair([ComparedEpisode("one", None)], [ComparedEpisode("one", 1.0)])
    assert (comparison.blocks, comparison.difference) == (1, -1.0)
    assert comparison.figures().new.unscored == 1


def test_outage_in_which_all_episodes_fail_gives_no_verdict() -> None:
    live, pairs, failed = (
        Comparison(RULE),
        Comparison(RULE),
        ComparedEpisode("one", None, failed=True),
    )
    for episode in range(4_000):
        live.add(episode % 2 == 0, failed)
    for _ in range(500):
        pairs.add_pair([failed] * 4, [failed] * 4)
    assert [one.verdict for one in (live, pairs)] == [None, None]
    assert [one.blocks for one in (live, pairs)] == [0, 0]


def test_confidence_bounds_enclose_the_difference_of_the_arms_rewards() -> None:
    figures = compared(scored(0.8, malformed=False)).figures()
    assert figures.difference is not None
    assert -RULE.margin < figures.lower < 0.3 < figures.upper
    assert figures.lower < figures.difference < figures.upper


@pytest.mark.parametrize(
    ("per_hour", "taken", "share"),
    [(0.0, 0.0, MOST_SHARE), (2.0, 0.0, MOST_SHARE), (2.0, 0.5, 0.25), (1e6, 0.0, LEAST_SHARE)],
)
def test_canarys_share_falls_with_the_traffic_within_bounds(
    per_hour: float, taken: float, share: float
) -> None:
    assert canary_share(per_hour, RULE, taken) == share


def test_canarys_share_suffices_for_a_decision_in_time() -> None:
    share = canary_share(100.0, RULE)
    episodes = 100.0 * (RULE.decide_within_h - RULE.reward_delay_s / 3600)
    assert LEAST_SHARE < share < MOST_SHARE
    assert episodes * share * (1 - share) == pytest.approx(TRIAL_INFORMATION)


def test_nan_reward_counts_as_unscored() -> None:
    comparison = Comparison(RULE)
    comparison.add_pair(
        [ComparedEpisode("one", nan), ComparedEpisode("one", 0.5)], [ComparedEpisode("one", 1.0)]
    )
    figures = comparison.figures()
    assert (figures.difference, figures.new.unscored, figures.new.clipped) == (-0.5, 1, 0)
