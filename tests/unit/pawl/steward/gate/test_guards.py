"""Guards: what a canary may not do more often than what serves, whatever its rewards."""

from collections.abc import Callable
from random import Random

import msgspec
import pytest

from pawl.steward.gate.records import CANARY, SERVING, Episode, GateOptions
from pawl.steward.gate.trial import FIRST_TIMES, Slowness, all_guards
from store.records import Arm
from tests.unit.pawl.steward.gate.streams import arm_of, decide, decided

Make = Callable[[Arm, bool], Episode]
WAYS: dict[str, Make] = {
    "failed requests": lambda arm, wrong: Episode(arm, "one", 0.5, failed=wrong),
    "malformed tool calls": lambda arm, wrong: Episode(arm, "one", 0.5, malformed=wrong),
    "failed tools": lambda arm, wrong: Episode(arm, "one", 0.5, tools_failed=wrong),
    "slow episodes": lambda arm, wrong: Episode(arm, "one", 0.5, seconds=9.0 if wrong else 3.0),
    "unscored episodes": lambda arm, wrong: Episode(arm, "one", None if wrong else 0.5),
}
# Rewards that are equal would promote the canary before a guard has seen enough.
OPTIONS = GateOptions(fewest=100_000)


def episodes(make: Make, canary: float, serving: float, count: int = 4_000) -> list[Episode]:
    random = Random(1)
    arms = [arm_of(random, base=0.0) for _ in range(count)]
    return [make(arm, random.random() < (canary if arm == CANARY else serving)) for arm in arms]


@pytest.mark.parametrize("way", WAYS)
def test_one_that_goes_wrong_far_more_often_is_retired(way: str) -> None:
    found = decide(episodes(WAYS[way], canary=0.5, serving=0.1), OPTIONS, 0)
    assert found.kind == "retire"
    assert found.reason.startswith(f"more {way} than what serves")
    (guard,) = [one for one in found.guards if one.name == way]
    assert guard.wealth >= guard.needed
    assert guard.canary is not None
    assert guard.serving is not None
    assert guard.canary > guard.serving


@pytest.mark.parametrize("way", WAYS)
def test_one_that_goes_wrong_as_often_is_not_retired(way: str) -> None:
    found = decide(episodes(WAYS[way], canary=0.3, serving=0.3), OPTIONS, 0)
    assert found.kind == "wait"
    # A guard that never applied knows nothing.
    unused = [one for one in found.guards if one.canary is None]
    assert all((one.serving, one.wealth) == (None, 1.0) for one in unused)
    assert len(unused) == 5 - len({way, "failed requests", "unscored episodes"})


def test_slow_is_twice_the_median_of_what_serves_before_the_block() -> None:
    slowness = Slowness(block_size=2)
    serving = Episode(SERVING, "one", None, seconds=1.0)
    for _ in range(FIRST_TIMES):
        assert slowness.is_slow(serving) is None
    assert slowness.is_slow(Episode(CANARY, "one", None, seconds=2.0)) is False
    assert slowness.is_slow(Episode(CANARY, "one", None, seconds=2.1)) is True
    assert slowness.is_slow(Episode(CANARY, "one", None)) is None


def hidden(random: Random, share: float, right: float, count: int = 6_000) -> list[Episode]:
    """Episodes of which this share of the canary's wrong ones, and none of the others, has no
    reward: clients leave."""
    found = []
    for _ in range(count):
        arm = arm_of(random, base=0.0)
        reward = float(random.random() < right)
        leaves = arm == CANARY and not reward and random.random() < share
        found.append(Episode(arm, "one", None if leaves else reward))
    return found


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_none_gets_the_traffic_by_leaving_its_wrong_answers_unscored(share: float) -> None:
    """By those that are scored it is far better, which is shown before a guard has seen enough."""
    found = [decided(hidden(Random(n), share, 0.5), GateOptions()) for n in range(10)]
    assert {one.kind for one in found} == {"retire"}
    assert {one.reason.split(":")[0] for one in found} == {
        "more unscored episodes than what serves"
    }


def test_an_episode_that_failed_is_no_unscored_one() -> None:
    """Without a reward it counts as the lowest, and is guarded as a failed one already."""
    [guard] = [one for one in all_guards(8) if one.figures(1.0).name == "unscored episodes"]
    guard.add(Episode(CANARY, "one", None, failed=True))
    guard.add(Episode(SERVING, "one", None))
    assert (guard.figures(1.0).canary, guard.figures(1.0).serving) == (0.0, 1.0)


@pytest.mark.parametrize("scored", [0.02, 0.1, 0.5])
def test_who_scores_a_part_of_the_episodes_loses_no_version_by_it(scored: float) -> None:
    """Whichever these are, as long as that does not depend on the version."""
    for seed in range(5):
        random = Random(seed)
        episodes = [
            msgspec.structs.replace(one, reward=one.reward if random.random() < scored else None)
            for one in hidden(random, 0.0, 0.5)
        ]
        assert decided(episodes, GateOptions()).kind != "retire"


def test_better_one_of_whose_episodes_a_tenth_is_scored_gets_the_traffic() -> None:
    random = Random(2)
    episodes = []
    for _ in range(12_000):
        arm = arm_of(random, base=0.0)
        reward = float(random.random() < (0.9 if arm == CANARY else 0.3))
        episodes.append(Episode(arm, "one", reward if random.random() < 0.1 else None))
    assert decided(episodes, GateOptions()).kind == "promote"


@pytest.mark.parametrize("way", WAYS)
def test_none_gets_the_traffic_while_a_guard_speaks_against_it(way: str) -> None:
    """What would be promoted by its rewards waits until the guard has seen enough."""
    random, episodes = Random(3), []
    for _ in range(1_000):
        arm = arm_of(random, canary=0.5, base=0.0)
        episode = WAYS[way](arm, arm == CANARY and random.random() < 0.5)
        reward = None if episode.reward is None else float(arm == CANARY)
        episodes.append(msgspec.structs.replace(episode, reward=reward))
    assert decided(episodes, GateOptions(margin=0.2)).kind == "retire"


def test_what_keeps_one_from_its_promotion_is_said() -> None:
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
