"""Guards: what a canary may not do more often than what serves, whatever its rewards."""

from collections.abc import Callable
from random import Random

import pytest

from pawl.steward.gate.guards import FIRST_TIMES, Slowness, all_guards
from pawl.steward.gate.records import CANARY, SERVING, Arm, Episode, GateOptions
from pawl.steward.gate.trial import decide
from tests.unit.pawl.steward.gate.streams import arm_of

Make = Callable[[Arm, bool], Episode]
WAYS: dict[str, Make] = {
    "failed requests": lambda arm, wrong: Episode(arm, "one", 0.5, failed=wrong),
    "malformed tool calls": lambda arm, wrong: Episode(arm, "one", 0.5, malformed=wrong),
    "failed tools": lambda arm, wrong: Episode(arm, "one", 0.5, tools_failed=wrong),
    "slow episodes": lambda arm, wrong: Episode(arm, "one", 0.5, seconds=9.0 if wrong else 3.0),
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
def test_one_that_goes_wrong_as_often_is_not(way: str) -> None:
    assert decide(episodes(WAYS[way], canary=0.3, serving=0.3), OPTIONS, 0).kind == "wait"


def test_a_guard_that_never_applied_knows_nothing() -> None:
    guards = all_guards(8)
    figures = [guard.figures(needed=160.0) for guard in guards]
    assert {(one.canary, one.serving, one.wealth) for one in figures} == {(None, None, 1.0)}


def test_slow_is_twice_the_median_of_what_serves_before_the_block() -> None:
    slowness = Slowness(block_size=2)
    serving = Episode(SERVING, "one", None, seconds=1.0)
    for _ in range(FIRST_TIMES):
        assert slowness.is_slow(serving) is None
    assert slowness.is_slow(Episode(CANARY, "one", None, seconds=2.0)) is False
    assert slowness.is_slow(Episode(CANARY, "one", None, seconds=2.1)) is True
    assert slowness.is_slow(Episode(CANARY, "one", None)) is None
