"""Read off the curves the episodes until 0.6, and the final reward at the end (pure)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final

from benchmarks.air.worlds import EASY, SPARSE, UNBOUNDED, WITH, WITHOUT, Look
from benchmarks.proxy.figures import Bar
from benchmarks.proxy.tables import NONE, Rows, number

# The bars: held-out success, and the share of the episodes that it may take with AIR.
SUCCESS: Final = 0.6
EPISODES_RATIO: Final = 0.5
# Two means of five seeds differ by so much through sampling alone.
NOISE: Final = 0.02
# The end of a curve: so many of its last looks, averaged.
LAST_LOOKS: Final = 5

Curve = Sequence[Look]
# Of one world: arm → seed → curve.
Curves = Mapping[str, Mapping[int, Curve]]


@dataclass(frozen=True, slots=True)
class Reach:
    """Count the episodes until held-out success was `SUCCESS`, by arm; None: it never was."""

    seed: int
    start: float
    with_air: int | None
    without: int | None
    # How many episodes a curve has at all.
    most: int

    @property
    def ratio(self) -> float | None:
        """Return with AIR / without; where it was never reached without, an upper bound of it."""
        return None if self.with_air is None else self.with_air / (self.without or self.most)


def reached(curve: Curve) -> int | None:
    """Return the episodes before the first look that saw `SUCCESS`."""
    return next((look.episodes for look in curve if look.r_final >= SUCCESS), None)


def reaches(curves: Curves) -> list[Reach]:
    """Return what each seed reached."""
    return [
        Reach(
            seed=seed,
            start=curve[0].r_final,
            with_air=reached(curve),
            without=reached(curves[WITHOUT.name][seed]),
            most=curve[-1].episodes,
        )
        for seed, curve in curves[WITH.name].items()
    ]


def median_ratio(found: Sequence[Reach]) -> float | None:
    """Return the median over seeds; None where AIR did not get most of them there."""
    ratios = [float("inf") if reach.ratio is None else reach.ratio for reach in found]
    middle = median(ratios) if ratios else float("inf")
    return middle if middle < float("inf") else None


def at_end(curve: Curve, what: str = "r_final") -> float:
    """Return the mean of a curve's last looks."""
    return fmean(getattr(look, what) for look in curve[-LAST_LOOKS:])


def mean_at_end(curves: Mapping[int, Curve], what: str = "r_final") -> float:
    """Return the mean over seeds of what the curves end at."""
    return fmean(at_end(curve, what) for curve in curves.values())


def bars(world: Mapping[str, Curves]) -> list[Bar]:
    """Judge the promises by `sparse` and `easy`."""
    easy = world[EASY.name]
    start = fmean(curve[0].r_final for curve in easy[WITH.name].values())
    end = mean_at_end(easy[WITH.name])
    return [
        Bar("episodes_with_per_without", median_ratio(reaches(world[SPARSE.name])), EPISODES_RATIO),
        Bar("easy_fall_from_start", start - end, 0.0),
        Bar("easy_fall_from_without", mean_at_end(easy[WITHOUT.name]) - end, NOISE),
    ]


def reach_table(title: str, found: Sequence[Reach]) -> Rows:
    """Return the sparse task's table, with a line for each seed and one for the median."""
    heads = ["seed", "success at the start", "episodes with AIR", "without", "ratio"]
    lines = [
        [
            str(reach.seed),
            number(reach.start, 3),
            _episodes(reach.with_air, reach.most),
            _episodes(reach.without, reach.most),
            _ratio(reach),
        ]
        for reach in found
    ]
    lines.append(["median", NONE, NONE, NONE, number(median_ratio(found), 2)])
    return Rows(title, heads, lines)


def _episodes(count: int | None, most: int) -> str:
    return f"> {most:,}" if count is None else number(count)


def _ratio(reach: Reach) -> str:
    if reach.ratio is None:
        return NONE
    return f"{'≤ ' if reach.without is None else ''}{number(reach.ratio, 2)}"


def easy_table(title: str, curves: Curves) -> Rows:
    """Return the table of the task with easy calls: how it began and what became of it."""
    heads = ["", "r_final at the start", "at the end", "least of a seed"]
    heads += ["calls an episode", "of them notes"]
    lines = [
        [
            arm,
            number(fmean(curve[0].r_final for curve in own.values()), 2),
            number(mean_at_end(own), 2),
            number(min(at_end(curve) for curve in own.values()), 2),
            number(mean_at_end(own, "calls"), 1),
            number(mean_at_end(own, "notes"), 1),
        ]
        for arm, own in curves.items()
    ]
    return Rows(title, heads, lines, [f"{UNBOUNDED.name}: a counter-example, no recipe of Pawl's."])
