"""`benchmarks.gate`: what it computes for many runs at once is what the product decides."""

import pytest

from benchmarks.gate.falls import FallWorld, run_falls
from benchmarks.gate.figures import Found, bars, tables
from benchmarks.gate.many import Differ, compare, verdicts
from benchmarks.gate.runs import Ends, fixed_horizon, options_for, peeked, run_world, seeded
from benchmarks.gate.successions import UntriedWorld, run_untried
from benchmarks.gate.worlds import EVEN_ODDS, HIDING, WORLDS, World, draw_runs
from pawl.steward.gate.records import GateOptions


def nothing(_: int) -> None:
    """Tell nobody."""


@pytest.mark.parametrize("effect", [-0.04, 0.2])
@pytest.mark.parametrize("world", [*WORLDS, *HIDING], ids=lambda world: world.name)
def test_the_arrays_decide_as_the_product_does(world: World, effect: float) -> None:
    options = options_for(world)
    drawn = draw_runs(world, effect, 4, 700, seeded(world.name, "test"))
    compare(drawn, verdicts(drawn, options), options, 4)


@pytest.mark.parametrize("more", [0.0, 0.3])
def test_the_arrays_have_the_product_s_guards(more: float) -> None:
    world = WORLDS[-1]._replace(wrong=0.2, more=more, canary_share=0.4)
    options = options_for(world)
    drawn = draw_runs(world, 0.3, 10, 700, seeded("guards", more))
    found = verdicts(drawn, options)
    compare(drawn, found, options, 10)
    assert set(found.kind) == ({-1} if more else {1})


def test_another_verdict_than_the_product_s_stops_the_run() -> None:
    drawn = draw_runs(EVEN_ODDS, -0.4, 1, 1_000, seeded("differ"))
    options = options_for(EVEN_ODDS)
    found = verdicts(drawn, options)
    with pytest.raises(Differ, match="run 0"):
        compare(drawn, found._replace(seen=found.seen + 1), options, 1)


def test_a_bad_one_is_retired_and_a_good_one_promoted() -> None:
    bad = run_world(EVEN_ODDS, -0.4, 20, 2_000, nothing)
    good = run_world(EVEN_ODDS, 0.4, 20, 2_000, nothing)
    assert (bad.retired, bad.promoted) == (20, 0)
    assert (good.retired, good.promoted) == (0, 20)
    assert bad.middle <= bad.ninth < 1_000


def test_a_test_with_one_look_needs_what_the_textbook_says() -> None:
    # (1.645 + 0.842)² · (0.24/0.1 + 0.25/0.9) / 0.12²
    assert fixed_horizon(EVEN_ODDS, 0.1, GateOptions()) == pytest.approx(1150, abs=5)


def test_looking_often_at_a_test_with_one_look_errs_more_often_than_it_says() -> None:
    assert peeked(EVEN_ODDS, 200, 1_500, options_for(EVEN_ODDS)) > 0.05


def test_a_line_of_untried_versions_that_falls_is_found_and_one_that_does_not_is_left() -> None:
    fallen = run_untried(UntriedWorld(0.3, 0.7, each=60), 2, 1_200, nothing)
    assert (fallen.early, len(fallen.found), fallen.short) == (0, 2, 0)
    assert max(fallen.found) < 600
    assert len(fallen.lost) == 2
    stays = run_untried(UntriedWorld(0.3, 0.0, each=60), 2, 1_200, nothing)
    assert (stays.early, stays.found) == (0, [])


def test_figures_become_tables_and_bars() -> None:
    ends = Ends(world="w", effect=0.0, runs=100, promoted=6, retired=5, taken=[10] * 11, fixed=5.0)
    falls = [run_falls(FallWorld(0.1, 0.0, later=100), 1, 200, nothing)]
    untried = [run_untried(UntriedWorld(0.1, 0.0, each=50), 1, 200, nothing)]
    found = Found(
        equal=[ends],
        worse=[ends],
        effects=[ends],
        hidden=[ends],
        falls=falls,
        untried=untried,
        peeked=0.2,
        episodes=10,
    )
    assert [bar.holds for bar in bars(found)] == [True, False, False, True, True]
    assert [table.title for table in tables(found)] == [
        "Mistakes",
        "Episodes to a verdict",
        "Wrong answers that nobody scores",
        "Roll-back",
        "Roll-back without trials",
    ]
    assert "0.050" in tables(found)[0].markdown()
