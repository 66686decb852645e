"""Define what is measured, and the bars it is held against (pure)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Final

BATCH_GAP_S: Final = 0.05
ALONE, MANY = 1, 64
STREAMS: Final = (1, 256, 1000)


@dataclass(frozen=True, slots=True)
class Calls:
    """Measure whole calls, so many at once. CPU is given a call, by group of processes."""

    at_once: int
    calls: int
    failed: int
    calls_per_s: float
    median_ms: float
    p99_ms: float
    cpu_us: Mapping[str, float]
    # Of a peer that stores its calls: until the last was stored, from the load's end on.
    stored: int | None = None
    drain_s: float | None = None

    @property
    def cpu_us_in_all(self) -> float:
        """Return the sum of all groups."""
        return sum(self.cpu_us.values())

    @property
    def sustained_per_s(self) -> float:
        """Return calls a second, counted until all were stored."""
        if self.drain_s is None:
            return self.calls_per_s
        return self.calls / (self.calls / self.calls_per_s + self.drain_s)


def combined(rounds: Sequence[Calls]) -> Calls:
    """Combine several rounds of one load: add counts up, and take the median of the rest."""
    first = rounds[0]
    kept = [one for one in rounds if one.stored is not None and one.drain_s is not None]
    return Calls(
        at_once=first.at_once,
        calls=sum(one.calls for one in rounds),
        failed=sum(one.failed for one in rounds),
        calls_per_s=median(one.calls_per_s for one in rounds),
        median_ms=median(one.median_ms for one in rounds),
        p99_ms=median(one.p99_ms for one in rounds),
        cpu_us={group: median(one.cpu_us[group] for one in rounds) for group in first.cpu_us},
        stored=sum(one.stored or 0 for one in kept) if kept else None,
        drain_s=sum(one.drain_s or 0 for one in kept) if kept else None,
    )


@dataclass(frozen=True, slots=True)
class Streams:
    """Measure streams of ten chunks a second, so many at once; `failed` counts by reason."""

    at_once: int
    started: int
    failed: Mapping[str, int]
    batched: int
    chunks: int
    first_median_ms: float
    first_p99_ms: float
    delay_median_ms: float
    delay_p99_ms: float
    cpu_us: Mapping[str, float]

    @property
    def failures(self) -> int:
        """Return the number of failures, for whatever reason."""
        return sum(self.failed.values())

    @property
    def cpu_us_in_all(self) -> float:
        """Return the sum of all groups, a chunk."""
        return sum(self.cpu_us.values())


@dataclass(slots=True)
class Peer:
    """Hold one row: what was found, or why nothing was. `no_streams` says why there are none."""

    name: str
    version: str = ""
    missing: str = ""
    no_streams: str = ""
    calls: dict[int, Calls] = field(default_factory=dict)
    # Calls a second, `MANY` at once, round by round: peers take turns.
    rounds_per_s: list[float] = field(default_factory=list)
    large: Calls | None = None
    streams: dict[int, Streams] = field(default_factory=dict)
    memory_mib: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Bar:
    """Promise that `value` is at least, or at most, `limit`. None: it was not measured."""

    name: str
    value: float | None
    limit: float
    at_least: bool = False

    @property
    def holds(self) -> bool | None:
        """Return whether the promise holds; None where there is nothing to judge."""
        if self.value is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that `share` of all do not exceed (nearest rank); NaN of none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def batched(stamps: Sequence[float]) -> int:
    """Count the chunks of one delivered piece that had waited for a later one."""
    return sum(later - earlier >= BATCH_GAP_S for earlier, later in pairwise(stamps))


def bars(peers: Mapping[str, Peer]) -> list[Bar]:
    """Judge Pawl's promises, as far as this run can."""
    pawl = peers.get("pawl", Peer("pawl"))
    return [
        Bar("calls_per_nginx", _ratio(peers, "nginx"), 1 / 9, at_least=True),
        Bar("calls_per_litellm", _ratio(peers, "litellm"), 40, at_least=True),
        Bar("calls_per_agent_lightning", _ratio(peers, "agent-lightning"), 13, at_least=True),
        *_bars_of_calls(pawl.calls.get(MANY)),
        Bar("added_ms", _added_ms(peers), 0.8),
        Bar("large_reply_cpu_us", pawl.large.cpu_us_in_all if pawl.large else None, 600),
        *_bars_of_streams(pawl.streams.get(STREAMS[-1])),
    ]


def _bars_of_calls(found: Calls | None) -> list[Bar]:
    lost = None
    if found is not None and found.stored is not None:
        lost = float(max(0, found.calls - found.stored))
    return [
        Bar("calls_failed", float(found.failed) if found else None, 0),
        Bar("calls_not_stored", lost, 0),
    ]


def _bars_of_streams(found: Streams | None) -> list[Bar]:
    return [
        Bar("streams_failed", float(found.failures) if found else None, 0),
        Bar("streams_batched", float(found.batched) if found else None, 0),
        Bar("chunk_delay_p99_ms", found.delay_p99_ms if found else None, 10),
        Bar("first_chunk_p99_ms", found.first_p99_ms if found else None, 25),
        Bar("chunk_cpu_us", found.cpu_us_in_all if found else None, 80),
    ]


def _ratio(peers: Mapping[str, Peer], other: str) -> float | None:
    """Return the median over the rounds: what disturbs the machine disturbs both of a round."""
    if "pawl" not in peers or other not in peers:
        return None
    rounds = zip(peers["pawl"].rounds_per_s, peers[other].rounds_per_s, strict=False)
    ratios = [ours / theirs for ours, theirs in rounds if theirs]
    return median(ratios) if ratios else None


def _added_ms(peers: Mapping[str, Peer]) -> float | None:
    ours, direct = _calls(peers, "pawl", ALONE), _calls(peers, "direct", ALONE)
    return None if ours is None or direct is None else ours.median_ms - direct.median_ms


def _calls(peers: Mapping[str, Peer], name: str, at_once: int) -> Calls | None:
    return peers[name].calls.get(at_once) if name in peers else None
