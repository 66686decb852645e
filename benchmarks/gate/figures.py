"""Compute what the runs come to: mistakes by world, episodes to a verdict, and the bars."""

from collections.abc import Sequence
from typing import Final

from benchmarks.gate.falls import Falls
from benchmarks.gate.runs import POWER, Ends
from benchmarks.gate.successions import Untried
from benchmarks.proxy.figures import Bar, percentile
from benchmarks.proxy.tables import Rows, number
from store.records import Record

# The bar: the share of runs that may end by mistake.
MOST_MISTAKES: Final = 0.05


class Found(Record, frozen=True, kw_only=True):
    """Hold all that was simulated.

    Attributes:
        equal: canaries as good as what serves, by world.
        worse: canaries worse by the margin, by world.
        effects: canaries of several effects, to their verdicts.
        hidden: canaries that are worse, and a part of whose wrong answers is left unscored.
        falls: versions that serve, and fall.
        untried: versions that follow each other untried, and fall.
        peeked: the share of equals that a fixed-horizon test calls worse, looked at as often.
        episodes: looked at in each run of `equal` and `worse`.
    """

    equal: list[Ends]
    worse: list[Ends]
    effects: list[Ends]
    hidden: list[Ends]
    falls: list[Falls]
    untried: list[Untried]
    peeked: float
    episodes: int


def bars(found: Found) -> list[Bar]:
    """Return what the gate promises."""
    retired = max((one.retired / one.runs for one in found.equal), default=None)
    promoted = max((one.promoted / one.runs for one in found.worse), default=None)
    hidden = max((one.promoted / one.runs for one in found.hidden), default=None)
    healthy = [one.early / one.runs for one in found.falls if not one.fall]
    untried = [one.early / (one.runs * one.versions) for one in found.untried]
    return [
        Bar("retired by mistake, in the worst world", retired, MOST_MISTAKES),
        Bar("promoted by mistake, in the worst world", promoted, MOST_MISTAKES),
        Bar("promoted though it is worse, as that goes unscored", hidden, MOST_MISTAKES),
        Bar("rolled back by mistake", max(healthy, default=None), MOST_MISTAKES),
        Bar("untried versions rolled back by mistake", max(untried, default=None), MOST_MISTAKES),
    ]


def tables(found: Found) -> list[Rows]:
    """Return the mistakes, the speed, and the roll-backs."""
    return [
        _mistakes(found),
        _speed(found.effects),
        _hidden(found.hidden),
        _rolled_back(found.falls),
        _untried(found.untried),
    ]


def _mistakes(found: Found) -> Rows:
    lines = [
        [
            equal.world,
            f"{equal.runs:,}",
            f"{equal.retired / equal.runs:.3f}",
            f"{worse.promoted / worse.runs:.3f}",
            f"{equal.promoted / equal.runs:.3f}",
            f"{worse.retired / worse.runs:.3f}",
        ]
        for equal, worse in zip(found.equal, found.worse, strict=True)
    ]
    heads = ["rewards", "runs", "equal: **retired**", "worse: **promoted**"]
    heads += ["equal: promoted", "worse: retired"]
    note = (
        f"Each run is looked at after each of its {found.episodes:,} episodes, until its verdict;"
        " *worse* is by the margin, 0.02. In bold what is a mistake. A z-test of the same level"
        f" looked at as often calls {found.peeked:.3f} of equals worse (right or wrong, 0.5)."
        " *Wrong in each way*: this share of the episodes fails, is slow, or has no reward, and of"
        " those that call tools this share has a malformed call, or a tool that failed; *0.05"
        " more*: so many more of the canary's, in each way, which is the most that guards let pass."
    )
    return Rows("Mistakes", heads, lines, [note])


def _speed(effects: Sequence[Ends]) -> Rows:
    lines = [
        [
            f"{one.effect:+.2f}",
            f"{one.runs:,}",
            f"{one.promoted / one.runs:.3f}",
            f"{one.retired / one.runs:.3f}",
            number(one.middle),
            number(one.ninth),
            number(one.fixed),
            number(one.middle / one.fixed, 2),
        ]
        for one in effects
    ]
    heads = ["effect", "runs", "promoted", "retired", "episodes, median", "nine of ten"]
    heads += ["fixed horizon", "median in times of it"]
    note = (
        "Right or wrong, 0.5 for what serves; episodes of all arms, a tenth of them the canary's."
        f" *Fixed horizon*: a test with one look, at its end, that finds it in {POWER:.0%} of runs;"
        " it must know the effect beforehand."
    )
    return Rows("Episodes to a verdict", heads, lines, [note])


def _hidden(worlds: Sequence[Ends]) -> Rows:
    lines = [
        [
            one.world,
            f"{one.runs:,}",
            f"{one.promoted / one.runs:.3f}",
            f"{one.retired / one.runs:.3f}",
            number(one.middle),
            number(one.ninth),
        ]
        for one in worlds
    ]
    heads = ["unscored", "runs", "**promoted**", "retired", "episodes, median", "nine of ten"]
    note = (
        "Right or wrong, 0.5 for what serves and 0.4 for the canary; of its wrong episodes this"
        " share has no reward, of the others all have one. In bold what is a mistake."
    )
    return Rows("Wrong answers that nobody scores", heads, lines, [note])


def _rolled_back(falls: Sequence[Falls]) -> Rows:
    lines = [
        [
            f"{one.base_share:.0%}",
            f"{one.tried:,}" + (f" + {one.later:,}" if one.later else ""),
            f"−{one.fall:.1f}" if one.fall else "none",
            str(one.runs),
            str(one.early),
            str(len(one.found)),
            number(percentile(one.found, 0.5)),
            number(percentile(one.found, 0.9)),
        ]
        for one in falls
    ]
    heads = [
        "base share",
        "canary for",
        "fall",
        "runs",
        "by mistake",
        "found",
        "episodes after it, median",
    ]
    note = (
        "Each version is watched for 20,000 episodes, in a world whose mean swings by ±0.15 for"
        " all; it is 0.2 above the base, and falls after 5,000 where it does. Of the episodes that"
        " it had been a canary for, those after the + had begun by its promotion, and counted"
        " later."
    )
    return Rows("Roll-back", [*heads, "nine of ten"], lines, [note])


def _untried(worlds: Sequence[Untried]) -> Rows:
    lines = [
        [
            f"{one.base_share:.0%}",
            str(one.each),
            f"−{one.fall:.1f}" if one.fall else "none",
            str(one.runs),
            str(one.early),
            str(len(one.found)),
            number(percentile(one.found, 0.5)),
            number(percentile(one.found, 0.9)),
            number(percentile(one.lost, 0.5)),
            str(one.short),
        ]
        for one in worlds
    ]
    heads = ["base share", "episodes a version", "fall", "runs", "by mistake", "found"]
    heads += ["episodes after it, median", "nine of ten", "good versions lost, median"]
    note = (
        "Versions serve one after the other, each 0.01 better than the one before, up to 0.2 above"
        " the base, in a world whose mean swings by ±0.15 for all; from the middle on all are worse"
        " by the fall. *By mistake*: before that, in any of all the versions of a run. *Not far"
        " enough*: what serves again is from after the fall."
    )
    return Rows("Roll-back without trials", [*heads, "not far enough"], lines, [note])
