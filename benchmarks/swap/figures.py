"""Compute what a run comes to: gaps, calls, versions of episodes, swaps, and the bars (pure)."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from statistics import median
from typing import Final

from benchmarks.report import Bar, Rows, number, percentile
from benchmarks.swap.records import Call, Event, Gap, Load, Seen, Stored, Unload, Waited
from benchmarks.swap.schedule import Schedule, Span, spans, within
from store.records import Record

# The bar: so many times the p99 gap without loads may that with loads be.
TIMES: Final = 2.0
# Failed calls that are shown.
SHOWN: Final = 5


class Gaps(Record, frozen=True, kw_only=True):
    """Hold the gaps between two chunks of a reply over some spans, in milliseconds."""

    seconds: float
    gaps: int
    p50_ms: float
    p99_ms: float
    p999_ms: float
    max_ms: float
    first_p50_ms: float
    first_p99_ms: float


class Episodes(Record, frozen=True, kw_only=True):
    """Count what the ledger says of the episodes, and of the calls that clients saw answered.

    Of those with several versions some `had_to_leave` theirs, because it was retired before their
    next call (docs/decisions/041-several-policies.md); the others `changed`.
    `unstored` calls are not there, and `misnamed` ones have another version than their header.
    """

    episodes: int
    changed: int
    had_to_leave: int
    unstored: int
    misnamed: int


class Took(Record, frozen=True, kw_only=True):
    """Hold seconds from an optimiser step to a later moment, over all loads."""

    median_s: float
    max_s: float


class Found(Record, frozen=True, kw_only=True):
    """Hold the figures of one run."""

    layers: int
    streams: int
    minutes: float
    slots: int
    asked_loads: int
    loads: int
    rejected: tuple[str, ...]
    waited: int
    calls: int
    failed: int
    reasons: tuple[str, ...]
    with_loads: Gaps
    without: Gaps
    episodes: Episodes
    most_loaded: int
    left_loaded: int
    unloads: int
    unloaded_under_a_call: int
    unloaded_after: Took | None
    call: Took | None
    recorded: Took | None
    promoted: Took | None
    first_token: Took | None
    longest_gap: Took | None
    never_seen: int
    probe_s: float

    @property
    def ratio(self) -> float:
        """Return how many times the p99 gap without loads that with loads is."""
        return self.with_loads.p99_ms / self.without.p99_ms


def gaps_in(gaps: Iterable[Gap], calls: Iterable[Call], of: Sequence[Span]) -> Gaps:
    """Return the gaps that ended in some spans, and how soon the first text came of calls that
    began there.
    """
    own = [gap.seconds * 1000 for gap in gaps if within(gap.at, of)]
    first = [
        (call.first - call.began) * 1000
        for call in calls
        if call.first is not None and within(call.began, of)
    ]
    return Gaps(
        seconds=sum(ends - begins for begins, ends in of),
        gaps=len(own),
        p50_ms=percentile(own, 0.5),
        p99_ms=percentile(own, 0.99),
        p999_ms=percentile(own, 0.999),
        max_ms=max(own, default=float("nan")),
        first_p50_ms=percentile(first, 0.5),
        first_p99_ms=percentile(first, 0.99),
    )


def episodes_of(
    calls: Iterable[Call],
    stored: Sequence[Stored],
    retired: Mapping[int, datetime],
    policy: str,
) -> Episodes:
    """Compare the ledger's calls, oldest first, with what clients saw of those that succeeded."""
    by_episode: dict[str, list[Stored]] = {}
    for one in stored:
        by_episode.setdefault(one.episode, []).append(one)
    kinds = Counter(_kind(own, retired) for own in by_episode.values())
    kept = {one.id: f"{policy}@{one.version}" for one in stored}
    good = [call for call in calls if call.why is None]
    return Episodes(
        episodes=len(by_episode),
        changed=kinds["changed"],
        had_to_leave=kinds["had to leave"],
        unstored=sum(call.id not in kept for call in good),
        misnamed=sum(kept.get(call.id, call.version) != call.version for call in good),
    )


def _kind(own: Sequence[Stored], retired: Mapping[int, datetime]) -> str:
    """Return whether an episode kept its version, had to leave it, or changed it without need."""
    moves = [(one, other) for one, other in pairwise(own) if one.version != other.version]
    if not moves:
        return "kept"
    forced = all(
        one.version in retired and retired[one.version] <= other.at for one, other in moves
    )
    return "had to leave" if forced else "changed"


def took(times: Iterable[float]) -> Took | None:
    """Return median and maximum of some seconds, or None of none."""
    found = list(times)
    return Took(median_s=median(found), max_s=max(found)) if found else None


def first_tokens(calls: Iterable[Call]) -> dict[str, float]:
    """Return when each version's first text came to any client."""
    found: dict[str, float] = {}
    for call in calls:
        if call.first is not None:
            found[call.version] = min(call.first, found.get(call.version, call.first))
    return found


def last_ends(calls: Iterable[Call]) -> dict[str, float]:
    """Return when the last call of each version ended."""
    found: dict[str, float] = {}
    for call in calls:
        found[call.version] = max(call.ended, found.get(call.version, call.ended))
    return found


def longest_gaps(gaps: Iterable[Gap], loads: Sequence[Load]) -> list[float]:
    """Return the longest gap of any stream while each of the loads went on, in seconds.

    A gap that had begun before a load, or ended after it, counts. There are too few of these for
    the p99 of all gaps to tell of them.
    """
    found = dict.fromkeys(range(len(loads)), 0.0)
    steps = [one.step for one in loads]
    for gap in gaps:
        # The last load that had begun when the gap ended; they go on one after the other.
        number = bisect_right(steps, gap.at) - 1
        if number >= 0 and gap.at - gap.seconds < loads[number].promoted:
            found[number] = max(found[number], gap.seconds)
    return list(found.values())


class Run(Record, frozen=True, kw_only=True):
    """Hold all that was seen of a run, and how it was set up.

    `events` are the publisher's, in their order, and `stored` the ledger's calls, oldest first.
    """

    policy: str
    layers: int
    streams: int
    minutes: float
    slots: int
    probe_s: float
    schedule: Schedule
    calls: Sequence[Call]
    gaps: Sequence[Gap]
    events: Sequence[Event]
    stored: Sequence[Stored]
    retired: Mapping[int, datetime]


def figures(run: Run) -> Found:
    """Return the figures of a run; its first load came before it, and is not counted."""
    seen = [(one.at, one.loaded) for one in run.events if isinstance(one, Seen)]
    tried = [one for one in run.events if isinstance(one, Load)][1:]
    loads = [one for one in tried if one.rejected is None]
    unloads = [one for one in run.events if isinstance(one, Unload)]
    with_loads, without = spans(run.schedule, seen)
    first, last = first_tokens(run.calls), last_ends(run.calls)
    failed = [call for call in run.calls if call.why is not None]
    return Found(
        layers=run.layers,
        streams=run.streams,
        minutes=run.minutes,
        slots=run.slots,
        asked_loads=run.schedule.loads,
        loads=len(loads),
        rejected=tuple(one.rejected for one in tried if one.rejected is not None),
        waited=sum(isinstance(one, Waited) for one in run.events),
        calls=len(run.calls),
        failed=len(failed),
        reasons=tuple(_told(call, run.schedule) for call in failed[:SHOWN]),
        with_loads=gaps_in(run.gaps, run.calls, with_loads),
        without=gaps_in(run.gaps, run.calls, without),
        episodes=episodes_of(run.calls, run.stored, run.retired, run.policy),
        most_loaded=max((loaded for _, loaded in seen), default=0),
        left_loaded=seen[-1][1] if seen else 0,
        unloads=len(unloads),
        unloaded_under_a_call=sum(last.get(one.version, 0.0) > one.at for one in unloads),
        unloaded_after=took(one.at - last[one.version] for one in unloads if one.version in last),
        call=took(call.ended - call.began for call in run.calls),
        recorded=took(one.recorded - one.step for one in loads),
        promoted=took(one.promoted - one.step for one in loads),
        first_token=took(first[one.version] - one.step for one in loads if one.version in first),
        longest_gap=took(longest_gaps(run.gaps, loads)),
        never_seen=sum(one.version not in first for one in loads),
        probe_s=run.probe_s,
    )


def _told(call: Call, schedule: Schedule) -> str:
    """Say when a call failed, in seconds since the first turn began, and how far it had come."""
    begun, ended = (round(at - schedule.began, 1) for at in (call.began, call.ended))
    came = "no text" if call.first is None else f"text since {call.first - schedule.began:.1f}"
    return f"{call.version or 'no version'}, {begun} to {ended} s, {came}: {call.why}"


def bars(found: Found) -> list[Bar]:
    """Return the promises."""
    episodes = found.episodes
    return [
        Bar("loads", found.loads, found.asked_loads, at_least=True),
        Bar("calls failed", found.failed, 0),
        Bar("p99 gap, times that without loads", found.ratio, TIMES),
        Bar("episodes that changed their version", episodes.changed, 0),
        Bar("episodes that had to leave a retired version", episodes.had_to_leave, 0),
        Bar("answered calls that are not in the ledger", episodes.unstored, 0),
        Bar("answered calls of another version in the ledger", episodes.misnamed, 0),
        Bar("adapters loaded, at most", found.most_loaded, found.slots),
        Bar("adapters unloaded under a call", found.unloaded_under_a_call, 0),
        Bar("adapters loaded in the end", found.left_loaded, 1),
        Bar("versions that no client saw", found.never_seen, 0),
    ]


def tables(found: Found) -> list[Rows]:
    """Return the gaps, and what else was seen."""
    heads = ["", "seconds", "gaps", "median ms", "p99", "p99.9", "max"]
    heads += ["first text: median ms", "p99"]
    kinds = {"without loads": found.without, "with loads": found.with_loads}
    gaps = [
        [
            name,
            number(one.seconds),
            number(one.gaps),
            number(one.p50_ms, 1),
            number(one.p99_ms, 1),
            number(one.p999_ms, 1),
            number(one.max_ms, 1),
            number(one.first_p50_ms, 1),
            number(one.first_p99_ms, 1),
        ]
        for name, one in kinds.items()
    ]
    notes = [f"failed: {why}" for why in found.reasons]
    notes += [f"rejected: {why}" for why in found.rejected]
    title = f"{found.streams} streams, {found.layers} layers, {found.slots} adapter slots"
    return [
        Rows(title, heads, gaps, notes),
        Rows("Seconds", ["", "median", "max"], _seconds(found)),
        Rows("Counts", ["", ""], _counts(found)),
    ]


def _seconds(found: Found) -> list[list[str]]:
    rows = {
        "optimiser step → files recorded": found.recorded,
        "optimiser step → promoted": found.promoted,
        "optimiser step → first token at a client": found.first_token,
        "longest gap while a version was published": found.longest_gap,
        "last call of a version → unloaded": found.unloaded_after,
        "a call": found.call,
    }
    return [
        [name, number(one.median_s, 2), number(one.max_s, 2)]
        for name, one in rows.items()
        if one is not None
    ]


def _counts(found: Found) -> list[list[str]]:
    rows = {
        "loads": found.loads,
        "loads that had to wait for a slot": found.waited,
        "unloads": found.unloads,
        "calls": found.calls,
        "episodes": found.episodes.episodes,
    }
    return [[name, number(value)] for name, value in rows.items()]
