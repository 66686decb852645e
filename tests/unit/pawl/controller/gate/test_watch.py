"""The watch over what serves: rolled back from where a fall began, and not if the world falls."""

from collections.abc import Iterable
from itertools import product
from math import isclose
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pawl.controller.gate.betting import Block, Blocks, block_size
from pawl.controller.gate.records import BASE, CANARY, SERVING, Episode, GateOptions
from pawl.controller.gate.trial import (
    CELLS,
    Lead,
    Reference,
    cell_start,
    joined,
    lead_of_base,
    reference_of,
)
from pawl.controller.gate.watch import FallWealth, Succession, Watch, Watched
from store.records import Arm
from tests.unit.pawl.controller.gate.streams import stream

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


def test_promoted_version_that_falls_after_long_is_rolled_back() -> None:
    fallen = served(2_000, {BASE: 0.4, SERVING: 0.1, CANARY: 0.0}, seed=7)
    found = watched(served(2_000, HEALTHY) + fallen, reference())
    assert found.roll_back
    assert found.wealth >= found.needed
    assert "less far above the base" in found.reason


def test_promoted_version_is_not_rolled_back_without_a_base() -> None:
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


def test_episodes_begun_before_the_promotion_make_the_watch_after_a_short_trial_sharper() -> None:
    """Of 150 episodes a fall by 0.4 cannot be told from a version that never was above the base."""
    fallen = served(1_500, {BASE: 0.4, SERVING: 0.3, CANARY: 0.0}, seed=7)
    short = reference(count=150)
    assert not watched(fallen, short).roll_back
    later = reference(count=1_500, seed=9)
    assert watched(fallen, joined(short, later)).roll_back
    # And nothing is held against one that stays as it was.
    healthy = served(3_000, HEALTHY)
    assert not watched(healthy, joined(short, later)).roll_back


def test_episodes_begun_before_the_promotion_roll_back_no_version_that_stays_as_it_was() -> None:
    wrong = 0
    for seed in range(20):
        then = joined(reference(count=60, seed=seed), reference(count=200, seed=seed + 1_000))
        wrong += watched(served(200, HEALTHY, seed + 2_000), then).roll_back
    # At most 5 % each; 5 or more of 20 come of that in one of four hundred sets of seeds.
    assert wrong <= 4


def test_serving_base_is_compared_with_as_its_own_arm() -> None:
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


# A base share that needs few episodes: blocks of 8.
UNTRIED = GateOptions(base_share=0.3)
MARGIN = UNTRIED.scaled_margin


def serving(random: Random, version: int, count: int, lead: float) -> list[Episode]:
    """Episodes begun while a version served, right or wrong, of it and of the base model."""
    found = []
    for _ in range(count):
        is_base = random.random() < UNTRIED.base_share
        mean = 0.4 if is_base else 0.4 + lead
        arm: Arm = BASE if is_base else SERVING
        number = 0 if is_base else version
        found.append(Episode(arm, "one", float(random.random() < mean), version=number))
    return found


def following(versions: Iterable[int], *, after_base: bool = False) -> Succession:
    succession = Succession(UNTRIED, after_base=after_base)
    for version in versions:
        succession.follow(version)
    return succession


def followed(*parts: list[Episode], after_base: bool = False, old: int = 0) -> Watched:
    """What a succession comes to whose versions are numbered from 1; the first `old` are before."""
    succession = following(range(old + 1, len(parts) + 1), after_base=after_base)
    for part in parts:
        succession.extend(part)
    return succession.watched()


def line(leads: list[float], count: int, seed: int) -> list[list[Episode]]:
    random = Random(seed)
    return [serving(random, at, count, lead) for at, lead in enumerate(leads, 1)]


@pytest.mark.parametrize("lead", [-0.2, 0.0, 0.4])
def test_product_is_one_at_most_on_average_where_nothing_has_fallen(lead: float) -> None:
    """All ways in which three blocks then and three now can come out, with the margin just lost."""
    mean = 0.0
    for then in product([-1.0, 1.0], repeat=3):
        before = reference_of([Block(one, 2.0, 1.0) for one in then])
        chance = _chance(then, lead)
        for now in product([-1.0, 1.0], repeat=3):
            mean += chance * _chance(now, lead - MARGIN) * _fall_of(before, now, 2.0)
    assert 0 < mean <= 1 + 1e-9


@pytest.mark.parametrize("count", [1, 4, 7])
def test_product_against_the_base_is_one_on_average_where_the_margin_is_just_lost(
    count: int,
) -> None:
    mean = 0.0
    for now in product([-1.0, 1.0], repeat=count):
        mean += _chance(now, -MARGIN) * _fall_of(lead_of_base(), now, 1.4)
    assert isclose(mean, 1.0, rel_tol=1e-9)


def _fall_of(then: Reference, now: tuple[float, ...], weight: float) -> float:
    """The wealth after blocks that show these differences."""
    fall = FallWealth(then, MARGIN)
    for one in now:
        fall.update(Block(one, weight, 1.0))
    return fall.value


def _chance(shown: tuple[float, ...], mean: float) -> float:
    """How probable these differences of −1 and 1 are if their mean is this."""
    chance = 1.0
    for one in shown:
        chance *= (1 + one * mean) / 2
    return chance


def test_versions_that_get_better_stay() -> None:
    assert not followed(*line([0.03 * at for at in range(12)], 100, 2), after_base=True).roll_back


@pytest.mark.parametrize("count", [20, 120, 600])
def test_fall_is_found_with_the_version_that_it_began_with_or_one_shortly_before(
    count: int,
) -> None:
    """Also where no version has enough episodes for itself: 20 are less than three blocks."""
    good = 1200 // count
    found = followed(*line([0.4] * good + [-0.35] * good, count, 3))
    assert found.roll_back
    assert found.wealth >= found.needed == 20
    assert found.since is not None
    assert good + 1 - max(1, 200 // count) <= found.since <= good + 1
    assert found.lead is not None
    assert found.lead_before is not None
    assert found.lead < found.lead_before - 0.3
    assert f"since version {found.since} is less far above the base" in found.reason


def _renumbered(parts: list[list[Episode]], by: int) -> list[list[Episode]]:
    return [
        [
            Episode(one.arm, one.family, one.reward, version=one.version and one.version + by)
            for one in part
        ]
        for part in parts
    ]


def test_version_worse_than_the_base_model_is_found_without_anything_before_it() -> None:
    worse = line([-0.35] * 6, 120, 7)
    found = followed(*worse, after_base=True)
    assert (found.roll_back, found.since, found.lead_before) == (True, 1, 0.0)
    # Of what served before, if it was not the base, nothing is known.
    assert not followed(*worse).roll_back


@pytest.mark.parametrize(("after_base", "counts"), [(True, (150,)), (False, (150, 150))])
def test_watch_is_blind_until_something_is_known_of_what_served_before(
    after_base: bool, counts: tuple[int, ...]
) -> None:
    succession = Succession(UNTRIED, after_base=after_base)
    random = Random(12)
    assert succession.is_blind is not after_base
    for version, count in enumerate(counts, 1):
        succession.follow(version)
        succession.extend(serving(random, version, count, 0.2))
        assert succession.is_blind is (not after_base and version == 1)
    assert not succession.is_blind


def test_fall_may_begin_with_a_version_that_no_episode_began_with() -> None:
    """What was made of a collapsed one serves before any episode of that: both are rolled back."""
    good, bad = line([0.4] * 2, 600, 13), line([-0.35] * 4, 150, 14)
    assert followed(*good, [], [], *_renumbered(bad, 4)).since == 3
    assert followed([], *_renumbered(bad, 1), after_base=True).since == 1


def test_version_is_not_blamed_whose_episodes_began_before_any_was_read() -> None:
    bad = line([-0.35] * 4, 150, 15)
    succession = following(range(1, 7), after_base=True)
    succession.leave_unread(2)
    for part in _renumbered(bad, 2):
        succession.extend(part)
    assert succession.watched().since == 3


def test_untried_versions_are_not_rolled_back_without_a_base() -> None:
    falls = line([0.4] * 6 + [-0.4] * 6, 120, 8)
    alone = [[one for one in part if one.arm == SERVING] for part in falls]
    assert not followed(*alone, after_base=True).roll_back
    assert not followed().roll_back


def test_version_there_before_is_compared_with_and_not_watched() -> None:
    """A version put there by hand may be worse than the one before it."""
    parts = line([0.4] * 4 + [-0.3] * 4, 150, 9)
    assert followed(*parts, old=4).since == 5
    assert not followed(*parts, old=8).roll_back
    assert not followed(*parts[:5], *line([-0.3] * 4, 150, 9), old=8).roll_back


def test_canary_and_episodes_that_an_older_version_still_got_change_no_stretch() -> None:
    parts = line([0.4] * 4 + [-0.3] * 4, 150, 10)
    canaries = [Episode(CANARY, "one", 0.0, version=99)] * 40
    assert followed(*parts) == followed(*(part + canaries for part in parts))
    late = [Episode(SERVING, "one", 1.0, version=1)]
    assert followed(parts[0], parts[1], late + parts[2]).since in (1, 2, 3)


@given(st.integers(0, 2**32), st.lists(st.integers(1, 40), min_size=1, max_size=6))
@settings(max_examples=10, deadline=None)
def test_finding_does_not_depend_on_the_pieces_in_which_episodes_come(
    seed: int, pieces: list[int]
) -> None:
    random = Random(seed)
    parts = line([random.uniform(-0.4, 0.5) for _ in range(5)], 60, seed)
    # A version is known of no later than its first episode.
    succession = following(range(1, 6))
    left, at = [one for part in parts for one in part], 0
    while left:
        size, at = pieces[at % len(pieces)], at + 1
        succession.extend(left[:size])
        left = left[size:]
    assert succession.watched() == followed(*parts)


@given(st.integers(0, 2**32))
@settings(max_examples=8, deadline=None)
def test_fall_begins_with_a_watched_version_and_a_verdict_is_final(seed: int) -> None:
    random = Random(seed)
    counts = [random.randint(0, 90) for _ in range(12)]
    parts = [serving(random, at, n, random.uniform(-0.4, 0.6)) for at, n in enumerate(counts, 1)]
    succession = following(range(3, 13), after_base=True)
    final: Watched | None = None
    for part in parts:
        succession.extend(part)
        found = succession.watched()
        assert final is None or found == final
        assert found.roll_back == (found.wealth >= found.needed)
        assert found.since is None or 3 <= found.since <= 12
        final = found if found.roll_back else None


def test_versions_that_stay_as_they_were_are_hardly_ever_rolled_back() -> None:
    """Of 20 lines of six versions hardly any is; the bound, 5 % for each version, allows six."""
    wrong = sum(followed(*line([0.3] * 6, 70, seed)).roll_back for seed in range(20))
    assert wrong <= 2


def test_wealth_of_a_stretch_is_that_of_its_blocks_against_those_before() -> None:
    """What a stretch has is the wealth of its blocks against those before it."""
    random = Random(12)
    first, second = serving(random, 1, 160, 0.4), serving(random, 2, 80, 0.2)
    size = block_size(1 - UNTRIED.base_share, UNTRIED.base_share)
    blocks = Blocks(size)
    then = [*_blocks(blocks, first), blocks.close()]
    now = _blocks(blocks, second)
    fall = FallWealth(reference_of([one for one in then if one is not None]), MARGIN)
    for block in now:
        fall.update(block)
    found = followed(first, second, old=1)
    assert found.wealth == pytest.approx(fall.value)
    assert found.lead == pytest.approx(_mean(now))


def _blocks(blocks: Blocks, part: list[Episode]) -> list[Block]:
    found = [blocks.add(one.arm == SERVING, one.family, one.reward or 0.0) for one in part]
    return [one for one in found if one is not None]


def _mean(blocks: list[Block]) -> float:
    return sum(one.difference * one.weight for one in blocks) / sum(one.weight for one in blocks)
