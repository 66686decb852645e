"""Compute what a day comes to: shares by duration, live versions, and the bars."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import Final

from benchmarks.durations.day import Day
from benchmarks.durations.load import Episode, Load
from benchmarks.proxy.figures import Bar
from benchmarks.proxy.tables import Rows
from store.records import Record

MINUTE_S: Final = 60.0
# Minutes: the edges of what is told apart.
EDGES: Final = (2, 5, 10, 15, 20, 25, 30)
# The bar: trained shares of two durations may differ by so much.
APART: Final = 0.1


class Bucket(Record, frozen=True, kw_only=True):
    """Count episodes of similar duration: what share was trained, and what became of the others.

    `taken` counts trained ones and those of groups without spread, which teach nothing; `lost` were
    consumed for being too old or too far off the policy, or still wait.
    """

    name: str
    episodes: int
    trained: float
    taken: float
    lost: float


class Found(Record, frozen=True, kw_only=True):
    """Hold the figures of one day."""

    rules: str
    slots: int | None
    buckets: tuple[Bucket, ...]
    apart: float
    most_live: int
    mean_live: float
    versions: int
    mean_lag: float
    most_lag: int


def figures(day: Day, load: Load, rules: str, slots: int | None) -> Found:
    """Return the figures of the episodes that began two hours before the end or earlier."""
    decided = [one for one in day.episodes if one.begun < load.seconds - 7200.0]
    buckets = [
        _bucket(f"{low} to {high} min", _between(decided, low, high))
        for low, high in pairwise(EDGES)
    ]
    trained = [one.lag for one in decided if one.fate == "trained"]
    shares = [one.trained for one in buckets if one.episodes]
    live = [count for _, count in day.live]
    return Found(
        rules=rules,
        slots=slots,
        buckets=tuple(buckets),
        apart=max(shares) - min(shares),
        most_live=max(live),
        mean_live=fmean(live),
        versions=day.versions,
        mean_lag=fmean(trained or [0]),
        most_lag=max(trained, default=0),
    )


def _between(episodes: Sequence[Episode], low: int, high: int) -> list[Episode]:
    # The longest of all belong to the last.
    above = high * MINUTE_S + (high == EDGES[-1])
    return [one for one in episodes if low * MINUTE_S <= one.length < above]


def _bucket(name: str, episodes: Sequence[Episode]) -> Bucket:
    count = max(1, len(episodes))
    trained = sum(one.fate == "trained" for one in episodes)
    without = sum(one.fate == "no_spread" for one in episodes)
    return Bucket(
        name=name,
        episodes=len(episodes),
        trained=trained / count,
        taken=(trained + without) / count,
        lost=(len(episodes) - trained - without) / count,
    )


def tables(found: Sequence[Found]) -> list[Rows]:
    """Return the share by duration, and what the server had loaded."""
    names = [one.name for one in found[0].buckets]
    by_duration = [
        [
            name,
            f"{found[0].buckets[at].episodes:,}",
            *(f"{one.buckets[at].trained:.3f}" for one in found),
            *(f"{one.buckets[at].lost:.3f}" for one in found),
        ]
        for at, name in enumerate(names)
    ]
    head = ["duration", "episodes", *(f"trained, {one.rules}" for one in found)]
    head += [f"lost, {one.rules}" for one in found]
    loaded = [
        [
            one.rules,
            "any" if one.slots is None else str(one.slots),
            str(one.most_live),
            f"{one.mean_live:.1f}",
            f"{one.versions:,}",
            f"{one.mean_lag:.1f}",
            str(one.most_lag),
            f"{one.apart:.3f}",
        ]
        for one in found
    ]
    columns = ["rules", "adapter slots", "most live versions", "mean", "versions made"]
    columns += ["mean versions between sampling and training", "most", "trained shares apart"]
    return [Rows("Trained by duration", head, by_duration), Rows("Live", columns, loaded)]


def bars(found: Sequence[Found]) -> list[Bar]:
    """Return the promises about the days that have adapter slots."""
    return [
        bar
        for one in found
        if one.slots is not None
        for bar in (
            Bar(f"shares_apart, {one.rules}", one.apart, APART),
            Bar(f"live_versions, {one.rules}", float(one.most_live), one.slots),
        )
    ]
