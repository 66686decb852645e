"""A canary's trial: promoted, retired, or given more time, for the reasons that it says."""

from collections.abc import Callable
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pawl.controller.gate.records import BASE, CANARY, SERVING, Decision, Episode, GateOptions
from pawl.controller.gate.trial import FIRST_TIMES, Slowness, Trial, all_guards
from store.records import Arm
from tests.unit.pawl.controller.gate.streams import arm_of, decide, decided, stream

OPTIONS = GateOptions()
BETTER = stream(4_000, {BASE: 0.3, SERVING: 0.4, CANARY: 0.7})
WORSE = stream(4_000, {BASE: 0.3, SERVING: 0.6, CANARY: 0.3})
EQUAL = stream(2_000, {BASE: 0.3, SERVING: 0.5, CANARY: 0.5}, seed=2)
EPISODES = st.builds(
    Episode,
    st.sampled_from([BASE, CANARY, SERVING]),
    st.sampled_from(["a", "b"]),
    st.none() | st.floats(-0.5, 1.5),
    st.booleans(),
    st.none() | st.booleans(),
    st.none() | st.floats(0.1, 10),
)


@pytest.mark.parametrize("age_s", [60.0, 2 * OPTIONS.deadline_s])
def test_better_canary_is_promoted_and_worse_one_retired_at_any_age(age_s: float) -> None:
    better, worse = decide(BETTER, OPTIONS, age_s), decide(WORSE, OPTIONS, age_s)
    assert (better.kind, worse.kind) == ("promote", "retire")
    assert better.lower >= -OPTIONS.margin
    assert worse.upper <= 0
    assert better.better >= better.better_needed == 20
    assert worse.worse >= worse.worse_needed == 40
    assert better.reason == "scores no lower than what serves, less 0.02"
    assert worse.reason == "scores lower than what serves"


def test_canary_that_is_neither_better_nor_worse_waits_until_its_deadline() -> None:
    assert decide(EQUAL, OPTIONS, age_s=OPTIONS.deadline_s - 1).kind == "wait"
    late = decide(EQUAL, OPTIONS, age_s=OPTIONS.deadline_s)
    assert late.kind == "retire"
    assert "deadline" in late.reason


@pytest.mark.parametrize("episodes", [[], [Episode(SERVING, "one", 1.0)] * 500])
def test_trial_waits_without_episodes_of_both_arms(episodes: list[Episode]) -> None:
    found = decide(episodes, OPTIONS, age_s=0)
    assert (found.kind, found.lower, found.upper) == ("wait", -1.0, 1.0)


def test_canary_is_not_promoted_before_each_arm_has_enough_episodes() -> None:
    found = decided(BETTER, GateOptions(fewest=150))
    assert found.kind == "promote"
    assert found.arms[CANARY].episodes >= 150


@settings(max_examples=40)
@given(st.lists(EPISODES, max_size=120), st.lists(st.integers(0, 40), max_size=6))
def test_verdict_does_not_depend_on_the_pieces_in_which_episodes_come(
    episodes: list[Episode], pieces: list[int]
) -> None:
    trial, left = Trial(OPTIONS), episodes
    for size in pieces:
        trial.extend(left[:size])
        left = left[size:]
    trial.extend(left)
    assert trial.decide(1.0) == decide(episodes, OPTIONS, 1.0)


def test_verdict_stands_whatever_comes_later() -> None:
    trial = Trial(OPTIONS)
    trial.extend(WORSE)
    before = trial.decide(0)
    trial.extend(BETTER)
    assert trial.decide(0) == before


@pytest.mark.parametrize("episodes", [BETTER, WORSE, EQUAL])
def test_unit_of_rewards_changes_nothing_but_the_unit(episodes: list[Episode]) -> None:
    wide = GateOptions(reward_range=(-10.0, 10.0), margin=0.4)
    stretched = [
        msgspec.structs.replace(one, reward=None if one.reward is None else 20 * one.reward - 10)
        for one in episodes
    ]
    found, other = decide(episodes, OPTIONS, 0), decide(stretched, wide, 0)
    assert (found.kind, found.better, found.worse) == (other.kind, other.better, other.worse)
    assert other.lower == pytest.approx(20 * found.lower)
    assert other.upper == pytest.approx(20 * found.upper)


def test_few_rewards_out_of_range_count_as_its_ends_and_are_counted() -> None:
    beyond = [
        one if at % 40 else msgspec.structs.replace(one, reward=5.0 if one.reward else -7.0)
        for at, one in enumerate(BETTER)
    ]
    found, within = decide(beyond, OPTIONS, 0), decide(BETTER, OPTIONS, 0)
    assert found.kind == "promote"
    assert msgspec.structs.replace(found, arms=within.arms) == within
    for arm in (CANARY, SERVING):
        figures = found.arms[arm]
        assert 0 < figures.clipped <= 0.05 * figures.episodes
        assert within.arms[arm] == msgspec.structs.replace(figures, clipped=0)


def of_a_hundred(random: Random, mean: float) -> float:
    return min(max(random.gauss(mean, 5.0), 0.0), 100.0)


def partly_below_nothing(random: Random, mean: float) -> float:
    """Of −1 to 1, with parts of them in between."""
    return min(max(random.gauss(mean, 0.3), -1.0), 1.0)


@pytest.mark.parametrize(
    ("draw", "good", "bad", "right"),
    [(of_a_hundred, 90.0, 20.0, (0.0, 100.0)), (partly_below_nothing, -0.6, -0.9, (-1.0, 1.0))],
)
def test_canary_is_not_promoted_by_rewards_outside_of_the_range(
    draw: Callable[[Random, float], float], good: float, bad: float, right: tuple[float, float]
) -> None:
    """Between 0 and 1 the one that is far worse scores as high, or nearly so."""
    random, options = Random(4), GateOptions(margin=0.1)
    arms = [arm_of(random) for _ in range(8_000)]
    means = {CANARY: bad, SERVING: good, BASE: good}
    episodes = [Episode(arm, "one", draw(random, means[arm])) for arm in arms]
    found = decide(episodes, options, 0)
    assert found.kind == "wait"
    assert "outside of gate.reward_range, 0 to 1" in found.reason
    assert found.arms[CANARY].clipped > 0.05 * found.arms[CANARY].episodes
    late = decide(episodes, options, options.deadline_s)
    assert (late.kind, found.reason in late.reason) == ("retire", True)
    assert decide(episodes, GateOptions(reward_range=right, margin=0.1), 0).kind == "retire"


def test_rewards_outside_of_the_range_are_named_before_they_would_suffice() -> None:
    episodes = [
        msgspec.structs.replace(one, reward=30.0 if one.reward and one.arm == CANARY else 0.0)
        for one in EQUAL[:40]
    ]
    found = decide(episodes, OPTIONS, 0)
    assert found.kind == "wait"
    assert found.better < found.better_needed
    assert "of the canary's rewards lie outside of gate.reward_range" in found.reason


def test_worse_canary_is_retired_though_its_rewards_are_outside_of_the_range() -> None:
    below = [msgspec.structs.replace(one, reward=one.reward or -5.0) for one in WORSE]
    assert decide(below, OPTIONS, 0).reason == "scores lower than what serves"


def test_rounding_of_a_sum_is_not_outside_of_the_range() -> None:
    options = GateOptions(reward_range=(0.0, 0.3))
    assert not options.clips(Episode(CANARY, "one", 0.1 + 0.2))
    assert options.clips(Episode(CANARY, "one", 0.301))
    assert options.clips(Episode(CANARY, "one", -0.001))
    assert not options.clips(Episode(CANARY, "one", None, failed=True))


def test_failed_episode_without_a_reward_counts_as_the_lowest() -> None:
    options = GateOptions(reward_range=(-1.0, 1.0))
    failed = Episode(SERVING, "one", None, failed=True)
    assert options.scaled(failed) == 0.0
    assert options.scaled(msgspec.structs.replace(failed, reward=0.0)) == 0.5


def test_unscored_episodes_are_left_out_and_counted() -> None:
    """They are as many in each arm as are scored: a guard has nothing against either."""
    mixed = [one for each in EQUAL for one in (each, msgspec.structs.replace(each, reward=None))]
    found, without = decide(mixed, OPTIONS, 0), decide(EQUAL, OPTIONS, 0)
    assert (found.kind, found.lower, found.upper) == ("wait", without.lower, without.upper)
    assert found.arms[CANARY].unscored == without.arms[CANARY].episodes
    assert found.arms[CANARY].mean == without.arms[CANARY].mean


def test_decision_is_json_and_comes_back() -> None:
    found = decide(WORSE, OPTIONS, 0)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Decision) == found


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"reward_range": (1.0, 1.0)}, "reward_range"),
        ({"reward_range": (0.0, float("inf"))}, "reward_range"),
        ({"reward_range": (-1e308, 1e308)}, "reward_range"),
        ({"margin": 0.0}, "margin"),
        ({"margin": 1.0}, "margin"),
        ({"mistakes": 0.0}, "mistakes"),
        ({"mistakes": 1.0}, "mistakes"),
        ({"canary_share": 0.0}, "canary_share"),
        ({"canary_share": 0.7, "base_share": 0.3}, "base_share"),
    ],
)
def test_options_out_of_range_are_named(changed: dict[str, object], named: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=named):
        msgspec.convert(changed, GateOptions)


def test_reward_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="NaN"):
        Trial(OPTIONS).extend([Episode(CANARY, "one", float("nan"))])


def test_equal_canary_of_many_seeds_is_not_retired() -> None:
    options, means = GateOptions(canary_share=0.3), {SERVING: 0.5, CANARY: 0.5}
    retired = sum(
        decide(stream(300, means, seed, 0.3, 0.0), options, 0).kind == "retire"
        for seed in range(40)
    )
    # At most 5 % each; 6 or more of 40 come of that in one of seventy sets of seeds.
    assert retired <= 5


Make = Callable[[Arm, bool], Episode]
WAYS: dict[str, Make] = {
    "failed requests": lambda arm, wrong: Episode(arm, "one", 0.5, failed=wrong),
    "malformed tool calls": lambda arm, wrong: Episode(arm, "one", 0.5, malformed=wrong),
    "failed tools": lambda arm, wrong: Episode(arm, "one", 0.5, tools_failed=wrong),
    "slow episodes": lambda arm, wrong: Episode(arm, "one", 0.5, seconds=9.0 if wrong else 3.0),
    "unscored episodes": lambda arm, wrong: Episode(arm, "one", None if wrong else 0.5),
}


@pytest.mark.parametrize("way", WAYS)
def test_canary_that_goes_wrong_as_often_is_not_retired(way: str) -> None:
    random = Random(1)
    arms = [arm_of(random, base=0.0) for _ in range(4_000)]
    episodes = [WAYS[way](arm, random.random() < 0.3) for arm in arms]
    # Rewards that are equal would promote the canary before a guard has seen enough.
    found = decide(episodes, GateOptions(fewest=100_000), 0)
    assert found.kind == "wait"
    # A guard that never applied knows nothing.
    unused = [one for one in found.guards if one.canary is None]
    assert all((one.serving, one.wealth) == (None, 1.0) for one in unused)
    assert len(unused) == 5 - len({way, "failed requests", "unscored episodes"})


def test_slow_episode_takes_twice_the_median_of_what_serves_before_its_block() -> None:
    slowness = Slowness(block_size=2)
    serving = Episode(SERVING, "one", None, seconds=1.0)
    for _ in range(FIRST_TIMES):
        assert slowness.is_slow(serving) is None
    assert slowness.is_slow(Episode(CANARY, "one", None, seconds=2.0)) is False
    assert slowness.is_slow(Episode(CANARY, "one", None, seconds=2.1)) is True
    assert slowness.is_slow(Episode(CANARY, "one", None)) is None


def hidden(random: Random, share: float, right: float) -> list[Episode]:
    """Episodes of which this share of the canary's wrong ones, and none of the others, has no
    reward: clients leave."""
    found = []
    for _ in range(6_000):
        arm = arm_of(random, base=0.0)
        reward = float(random.random() < right)
        leaves = arm == CANARY and not reward and random.random() < share
        found.append(Episode(arm, "one", None if leaves else reward))
    return found


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_canary_is_not_promoted_by_leaving_its_wrong_answers_unscored(share: float) -> None:
    """By those that are scored it is far better, which is shown before a guard has seen enough."""
    found = [decided(hidden(Random(n), share, 0.5), GateOptions()) for n in range(10)]
    assert {one.kind for one in found} == {"retire"}
    assert {one.reason.split(":")[0] for one in found} == {
        "more unscored episodes than what serves"
    }


def test_failed_episode_is_not_an_unscored_one() -> None:
    """Without a reward it counts as the lowest, and is guarded as a failed one already."""
    [guard] = [one for one in all_guards(8) if one.figures(1.0).name == "unscored episodes"]
    guard.add(Episode(CANARY, "one", None, failed=True))
    guard.add(Episode(SERVING, "one", None))
    assert (guard.figures(1.0).canary, guard.figures(1.0).serving) == (0.0, 1.0)


@pytest.mark.parametrize("scored", [0.02, 0.1, 0.5])
def test_scoring_a_part_of_the_episodes_retires_no_canary(scored: float) -> None:
    """Whichever these are, as long as that does not depend on the version."""
    for seed in range(5):
        random = Random(seed)
        episodes = [
            msgspec.structs.replace(one, reward=one.reward if random.random() < scored else None)
            for one in hidden(random, 0.0, 0.5)
        ]
        assert decided(episodes, GateOptions()).kind != "retire"


def test_better_canary_is_promoted_by_a_tenth_of_its_episodes() -> None:
    random = Random(2)
    episodes = []
    for _ in range(12_000):
        arm = arm_of(random, base=0.0)
        reward = float(random.random() < (0.9 if arm == CANARY else 0.3))
        episodes.append(Episode(arm, "one", reward if random.random() < 0.1 else None))
    assert decided(episodes, GateOptions()).kind == "promote"


@pytest.mark.parametrize("way", WAYS)
def test_canary_that_goes_wrong_far_more_often_is_retired_whatever_its_rewards(way: str) -> None:
    """What would be promoted by its rewards waits until the guard has seen enough."""
    random, episodes = Random(3), []
    for _ in range(1_000):
        arm = arm_of(random, canary=0.5, base=0.0)
        episode = WAYS[way](arm, arm == CANARY and random.random() < 0.5)
        reward = None if episode.reward is None else float(arm == CANARY)
        episodes.append(msgspec.structs.replace(episode, reward=reward))
    found = decided(episodes, GateOptions(margin=0.2))
    assert found.kind == "retire"
    assert found.reason.startswith(f"more {way} than what serves")
    (guard,) = [one for one in found.guards if one.name == way]
    assert guard.wealth >= guard.needed
    assert guard.canary is not None
    assert guard.serving is not None
    assert guard.canary > guard.serving


def test_decision_says_what_keeps_a_canary_from_its_promotion() -> None:
    options = GateOptions(canary_share=0.5, base_share=0.0, margin=0.2)
    episodes = [
        Episode(CANARY if n % 2 else SERVING, "one", float(n % 2), failed=n % 20 in (1, 11))
        for n in range(160)
    ]
    found = decide(episodes, options, 0)
    assert found.kind == "wait"
    assert found.better >= found.better_needed
    assert found.reason.startswith("its rewards suffice, but it may have more failed requests than")
    late = decide(episodes, options, options.deadline_s)
    assert late.kind == "retire"
    assert found.reason in late.reason
