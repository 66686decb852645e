"""The screen Overview: what the doctor says, and how rewards, traffic and training go."""

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import groupby
from time import monotonic
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pawl.console.pages import console_of, fragment, page, reading, viewer
from pawl.doctor.examine import examine
from store.read.browsing import (
    MOST_COUNTED,
    Fate,
    Figures,
    Promotion,
    Rewards,
    Traffic,
    figures,
    promotions,
    traffic,
    waiting,
)
from store.records import EVAL, TRAIN, Record
from store.values.intervals import student, wilson

TITLE: Final = "Overview"
# What may be looked at, in days, and in how many parts.
PERIODS: Final = ("1", "7", "30")
USUAL: Final = "7"
# Of each policy, and of the policies, so that a page stays a page.
VERSIONS: Final = 8
POLICIES: Final = 12
# What the doctor said.
KEPT_S: Final = 10.0


async def overview(request: Request) -> Response:
    """Show the page at once; its parts follow, each by itself."""
    return page(request, "overview.html", days=_days(request), periods=PERIODS)


def _days(request: Request) -> str:
    days = request.query_params.get("days")
    return days if days in PERIODS else USUAL


def _since(request: Request) -> datetime:
    return datetime.now(UTC) - timedelta(days=int(_days(request)))


async def doctor(request: Request) -> Response:
    """Return what keeps policies from learning, as `pawl doctor` says it."""
    console = console_of(request)
    tenant = viewer(request).tenant
    # It asks all processes: once at a time, and not for each of those who look together.
    async with console.examining:
        until, found = console.examined.get(tenant, (0.0, []))
        if monotonic() > until:
            of_parts = tenant is None
            found = await examine(console.settings, console.engine, tenant, of_parts=of_parts)
            console.examined[tenant] = (monotonic() + KEPT_S, found)
    return fragment(request, "overview_doctor.html", found=found)


async def calls(request: Request) -> Response:
    """Return how many calls there were, why some cannot be trained, and what waits."""
    tenant = viewer(request).tenant
    async with reading(request) as connection:
        found = await traffic(connection, tenant, _since(request))
        waits = await waiting(connection, tenant)
    chart = _calls_chart(found)
    return fragment(
        request,
        "overview_calls.html",
        calls=found,
        chart=chart,
        waits=waits,
    )


async def rewards(request: Request) -> Response:
    """Return each policy's rewards, by time and by version, and what became of its episodes."""
    tenant = viewer(request).tenant
    async with reading(request) as connection:
        found = await figures(connection, tenant, _since(request))
        promoted = await promotions(connection, tenant, _since(request))
    cards = policy_cards(found, promoted)
    return fragment(
        request,
        "overview_rewards.html",
        cards=cards[:POLICIES],
        others=[card.policy for card in cards[POLICIES:]],
        since=found.since,
        most_episodes=MOST_COUNTED,
    )


class Mean(Record, frozen=True, kw_only=True):
    """Describe the mean of some rewards, and its 95 % interval where there are enough of them.

    `left`, `width` and `at` place interval and mean on a scale from 0 to 100.
    """

    scored: int
    mean: float
    low: float
    high: float
    left: float
    width: float
    at: float


class Line(Record, frozen=True, kw_only=True):
    """Show the rewards of a time or a version, `key`, live and held out."""

    key: Any
    live: Mean | None
    held_out: Mean | None


class PolicyCard(Record, frozen=True, kw_only=True):
    """Show a policy: its rewards by time and by version, and what became of its episodes.

    `older` versions are left out. `trained` of the episodes were trained, `fates` are the others'.
    """

    policy: str
    chart: dict[str, Any]
    times: list[Line]
    versions: list[Line]
    older: int
    episodes: int
    trained: int
    fates: list[Fate]


def policy_cards(found: Figures, promoted: Sequence[Promotion]) -> list[PolicyCard]:
    """Return a card for each policy, that of most episodes first (pure)."""
    cards = []
    for policy in sorted({fate.policy for fate in found.fates}):
        fates = [fate for fate in found.fates if fate.policy == policy]
        times = list(_lines(found.by_time, policy, lambda one: one.at))
        versions = list(_lines(found.by_version, policy, lambda one: one.version))[::-1]
        marks = [
            {"x": one.at.timestamp(), "label": f"@{one.version}"}
            for one in reversed(promoted)
            if one.policy == policy
        ]
        cards.append(
            PolicyCard(
                policy=policy,
                chart=_rewards_chart(times, marks),
                times=times,
                versions=versions[:VERSIONS],
                older=max(0, len(versions) - VERSIONS),
                episodes=sum(fate.episodes for fate in fates),
                trained=sum(fate.episodes for fate in fates if fate.state == "trained"),
                fates=[fate for fate in fates if fate.state != "trained"],
            )
        )
    return sorted(cards, key=lambda card: -card.episodes)


def _lines(
    rewards: Sequence[Rewards], policy: str, key: Callable[[Rewards], Any]
) -> Iterator[Line]:
    own = [one for one in rewards if one.policy == policy and one.scored]
    means = [one.mean for one in own if one.mean is not None]
    low, high = min([0.0, *means]), max([1.0, *means])
    for at, parts in groupby(sorted(own, key=key), key=key):
        by_split = {one.split: _mean(one, low, high) for one in parts}
        yield Line(key=at, live=by_split.get(TRAIN), held_out=by_split.get(EVAL))


def _mean(one: Rewards, low: float, high: float) -> Mean:
    """Return the mean of rewards, placed on a scale from `low` to `high`."""
    assert one.mean is not None
    if one.graded:
        interval = student(one.mean, one.spread or 0.0, one.scored)
    else:
        interval = wilson(one.mean, one.scored)

    def place(value: float) -> float:
        return round(100 * min(1.0, max(0.0, (value - low) / (high - low))), 2)

    bounds = interval or (one.mean, one.mean)
    left = place(bounds[0])
    return Mean(
        scored=one.scored,
        mean=one.mean,
        low=bounds[0],
        high=bounds[1],
        left=left,
        width=max(0.4, place(bounds[1]) - left),
        at=place(one.mean),
    )


def _rewards_chart(times: Sequence[Line], marks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def series(label: str, means: Sequence[Mean | None]) -> dict[str, Any]:
        columns = {"values": [one and round(one.mean, 4) for one in means]}
        columns["low"] = [one and round(one.low, 4) for one in means]
        columns["high"] = [one and round(one.high, 4) for one in means]
        return {"name": label, **columns}

    means = [one.mean for line in times for one in (line.live, line.held_out) if one is not None]
    held_out = series("held out", [line.held_out for line in times]) | {"dashed": True}
    return {
        "kind": "lines",
        "x": [line.key.timestamp() for line in times],
        "series": [series("live", [line.live for line in times]), held_out],
        "marks": list(marks),
        # Rewards of another scale have their own limits.
        "range": [min([0.0, *means]), max([1.0, *means])],
    }


def _calls_chart(found: Traffic) -> dict[str, Any]:
    minutes = found.width.total_seconds() / 60
    every, failed = ([round(part[n] / minutes, 3) for part in found.parts] for n in (0, 1))
    return {
        "kind": "lines",
        "x": [(found.since + found.width * n).timestamp() for n in range(len(found.parts))],
        "series": [
            {"name": "calls", "values": every},
            {"name": "failed", "values": failed, "dashed": True},
        ],
        "range": [0, 1.05 * max(1.0, *every)],
    }


ROUTES: Final = [
    Route("/", overview, name="overview"),
    Route("/overview/doctor", doctor, name="overview_doctor"),
    Route("/overview/calls", calls, name="overview_calls"),
    Route("/overview/rewards", rewards, name="overview_rewards"),
]
