"""The screen Overview: what the doctor says, and how rewards, traffic and training go."""

from datetime import UTC, datetime, timedelta
from itertools import groupby
from time import monotonic
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pawl.console.pages import console_of, page, part, reading, viewer
from pawl.doctor.examine import examine
from store.read.browsing import MOST_COUNTED, Rows, outcomes, promotions, traffic, waiting
from store.records import EVAL, TRAIN
from store.values.intervals import mean_interval

# What may be looked at, in days.
PERIODS: Final = ("1", "7", "30")
USUAL: Final = "7"
# What the doctor said.
KEPT_S: Final = 10.0


async def overview(request: Request) -> Response:
    """Show the page at once; its parts follow, each by itself."""
    return page(request, "overview.html", days=_days(request), periods=PERIODS)


def _days(request: Request) -> str:
    days = request.query_params.get("days")
    return days if days in PERIODS else USUAL


async def doctor(request: Request) -> Response:
    """Return what keeps policies from learning, as `pawl doctor` says it."""
    console = console_of(request)
    tenant = viewer(request).tenant
    # It asks all processes: once at a time, and not for each of those who look together.
    async with console.examining:
        until, findings = console.examined.get(tenant, (0.0, []))
        if monotonic() > until:
            of_parts = tenant is None
            findings = await examine(console.settings, console.engine, tenant, of_parts=of_parts)
            console.examined[tenant] = (monotonic() + KEPT_S, findings)
    return part(request, "overview_doctor.html", findings=findings)


async def figures(request: Request) -> Response:
    """Return how traffic, rewards and training go: of all calls, and of each policy."""
    tenant = viewer(request).tenant
    begun = datetime.now(UTC) - timedelta(days=int(_days(request)))
    async with reading(request) as connection:
        counts = await traffic(connection, tenant, begun)
        waits = await waiting(connection, tenant)
        rows, since = await outcomes(connection, tenant, begun)
        promoted = await promotions(connection, tenant, begun)
    parts = [row for row in counts if row.part is not None]
    cards = [
        _card(policy, list(own), [row for row in promoted if row.policy == policy])
        for policy, own in groupby(rows, key=lambda row: row.policy)
    ]
    return part(
        request,
        "overview_figures.html",
        calls=sum(row.calls for row in parts),
        calls_since=parts[0].part if parts else None,
        calls_chart=_calls_chart(parts),
        reasons=[row for row in counts if row.reason is not None],
        waits=waits,
        cards=sorted(cards, key=lambda card: -card["episodes"]),
        since=since,
        most_episodes=MOST_COUNTED,
    )


def _calls_chart(parts: Rows) -> dict[str, Any]:
    minute = timedelta(minutes=1)
    every = [row.calls * minute / row.width for row in parts]
    failed = [row.failed * minute / row.width for row in parts]
    return {
        "kind": "lines",
        "x": [row.part.timestamp() for row in parts],
        "series": [
            {"name": "calls", "values": every},
            {"name": "failed", "values": failed, "dashed": True},
        ],
        "range": [0, 1.05 * max([1.0, *every])],
    }


def _card(policy: str, rows: Rows, promoted: Rows) -> dict[str, Any]:
    """Return what is shown of a policy, from its rows of `outcomes` and of `promotions`."""
    times: dict[Any, dict[str, Any]] = {}
    versions: dict[Any, dict[str, Any]] = {}
    for row in rows:
        if row.scored and row.split is not None:
            low, high = mean_interval(row.mean, row.spread, row.scored, zero_or_one=row.zero_or_one)
            lines, at = (versions, row.version) if row.part is None else (times, row.part)
            lines.setdefault(at, {})[row.split] = {**row._mapping, "low": low, "high": high}
    fates = [row for row in rows if row.state is not None]

    def series(split: str, **more: Any) -> dict[str, Any]:
        means = [line.get(split) for line in times.values()]
        columns = (("values", "mean"), ("low", "low"), ("high", "high"))
        return {name: [mean and mean[key] for mean in means] for name, key in columns} | more

    values = [mean["mean"] for line in times.values() for mean in line.values()]
    return {
        "policy": policy,
        "episodes": sum(row.episodes for row in fates),
        "trained": sum(row.episodes for row in fates if row.state == "trained"),
        "fates": [row for row in fates if row.state != "trained"],
        # Both are by split.
        "times": times,
        "versions": versions,
        "chart": {
            "kind": "lines",
            "x": [at.timestamp() for at in times],
            "series": [series(TRAIN, name="live"), series(EVAL, name="held out", dashed=True)],
            "marks": [
                {"x": row.at.timestamp(), "label": f"@{row.version}"} for row in promoted[::-1]
            ],
            # Rewards of another scale have their own limits.
            "range": [min([0.0, *values]), max([1.0, *values])],
        },
    }


ROUTES: Final = [
    Route("/", overview, name="overview"),
    Route("/overview/doctor", doctor, name="overview_doctor"),
    Route("/overview/figures", figures, name="overview_figures"),
]
