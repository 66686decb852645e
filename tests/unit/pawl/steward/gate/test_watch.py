"""The watch over what serves: rolled back if it falls, and not if the world does."""

import msgspec
import pytest

from pawl.steward.gate.records import BASE, CANARY, SERVING, Episode, GateOptions
from pawl.steward.gate.trial import CELLS, Lead, Reference, cell_start, joined
from pawl.steward.gate.watch import Watch, Watched
from store.records import Arm
from tests.unit.pawl.steward.gate.streams import stream

# A base share that needs few episodes.
OPTIONS = GateOptions(canary_share=0.3, base_share=0.3)
HEALTHY: dict[Arm, float] = {BASE: 0.4, SERVING: 0.7, CANARY: 0.7}


def reference(count: int = 1_500, seed: int = 5) -> Reference:
    lead = Lead(OPTIONS)
    lead.extend(stream(count, HEALTHY, seed, canary=0.3, base=0.3))
    return lead.reference()


def served(count: int, means: dict[Arm, float], seed: int = 6) -> list[Episode]:
    return stream(count, means, seed, canary=0.0, base=0.3)


def watched(episodes: list[Episode], then: Reference) -> Watched:
    watch = Watch(then, OPTIONS)
    watch.extend(episodes)
    return watch.watched()


def test_one_that_falls_is_rolled_back_also_after_long() -> None:
    fallen = served(2_000, {BASE: 0.4, SERVING: 0.1, CANARY: 0.0}, seed=7)
    found = watched(served(2_000, HEALTHY) + fallen, reference())
    assert found.roll_back
    assert found.wealth >= found.needed
    assert "less far above the base" in found.reason


def test_without_a_base_nothing_is_known_then_or_now() -> None:
    fallen = served(2_000, {BASE: 0.4, SERVING: 0.0, CANARY: 0.0})
    assert not watched([one for one in fallen if one.arm == SERVING], reference()).roll_back
    assert not watched(fallen, reference(count=0)).roll_back


def test_canary_s_episodes_are_passed_over() -> None:
    episodes = served(800, HEALTHY)
    with_canary = [one for each in episodes for one in (each, Episode(CANARY, "one", 0.0))]
    assert watched(with_canary, reference()) == watched(episodes, reference())


def test_reference_says_less_the_higher_the_difference() -> None:
    logs = reference().logs
    assert logs == sorted(logs, reverse=True)
    assert logs[0] > 3.0
    assert logs[-1] < 0.0
    assert (cell_start(0), cell_start(CELLS)) == (-1.0, 1.0)


def test_of_a_short_trial_what_began_before_the_promotion_makes_the_watch_sharper() -> None:
    """Of 150 episodes a fall by 0.4 cannot be told from a version that never was above the base."""
    fallen = served(1_500, {BASE: 0.4, SERVING: 0.3, CANARY: 0.0}, seed=7)
    short = reference(count=150)
    assert not watched(fallen, short).roll_back
    later = reference(count=1_500, seed=9)
    assert watched(fallen, joined(short, later)).roll_back
    # And nothing is held against one that stays as it was.
    healthy = served(3_000, HEALTHY)
    assert not watched(healthy, joined(short, later)).roll_back


def test_what_began_before_the_promotion_rolls_back_none_that_stays_as_it_was() -> None:
    wrong = 0
    for seed in range(20):
        then = joined(reference(count=60, seed=seed), reference(count=200, seed=seed + 1_000))
        wrong += watched(served(200, HEALTHY, seed + 2_000), then).roll_back
    # At most 5 % each; 5 or more of 20 come of that in one of four hundred sets of seeds.
    assert wrong <= 4


def test_where_the_base_serves_it_is_its_own_arm() -> None:
    episodes = stream(1_500, HEALTHY, 5, canary=0.3, base=0.3)
    as_serving = [
        msgspec.structs.replace(one, arm=SERVING if one.arm == BASE else one.arm)
        for one in episodes
        if one.arm != SERVING
    ]
    lead = Lead(OPTIONS, base_serves=True)
    lead.extend(as_serving)
    assert lead.reference().logs[0] > 3.0
    none = Lead(OPTIONS)
    none.extend(as_serving)
    assert max(none.reference().logs) == 0.0


def test_reference_with_another_number_of_cells_is_refused() -> None:
    with pytest.raises(ValueError, match="100 entries"):
        Reference([0.0])
