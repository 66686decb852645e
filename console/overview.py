"""The screen Overview: the doctor's findings, rewards and training."""

from collections import Counter
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from console.pages import console_of, page, part, reading, viewer_of
from pawl.doctor.diagnosis import diagnose
from store.read.browsing import MOST_COUNTED, Rows, count_outcomes, newest_promotions
from store.read.evaluations import Rewards, rewards_from_row
from store.read.health import count_newest_calls
from store.read.lineage import rewards_since_base
from store.records import EVAL, SIDE, TRAIN

# The periods to choose from, in days.
PERIODS: Final = ("1", "7", "30")
DEFAULT_PERIOD: Final = "7"
NO_REWARDS: Final = Rewards(episodes=0, scored=0)


async def overview(request: Request) -> Response:
    """Show the page at once; its parts are loaded separately."""
    return page(request, "overview.html", days=_chosen_days(request), periods=PERIODS)


def _chosen_days(request: Request) -> str:
    days = request.query_params.get("days")
    return days if days in PERIODS else DEFAULT_PERIOD


async def doctor(request: Request) -> Response:
    """Show the findings and outlooks of `pawl doctor`."""
    console, tenant = console_of(request), viewer_of(request).tenant
    findings = await console.examined.get(
        tenant,
        lambda: diagnose(console.settings, console.unqueued, tenant, of_parts=tenant is None),
    )
    return part(
        request,
        "overview_doctor.html",
        findings=[one for one in findings if not one.is_outlook],
        outlooks=[one for one in findings if one.is_outlook],
    )


async def figures(request: Request) -> Response:
    """Show how many calls are trainable, and the rewards and outcomes of each policy."""
    tenant = viewer_of(request).tenant
    begun = datetime.now(UTC) - timedelta(days=int(_chosen_days(request)))
    async with reading(request) as connection:
        kinds = await count_newest_calls(connection, datetime.now(UTC), tenant)
        rows, since = await count_outcomes(connection, tenant, begun)
        promoted = await newest_promotions(connection, tenant, begun)
        lifts = await rewards_since_base(connection, tenant)
    reasons: Counter[str | None] = Counter()
    for kind in kinds:
        reasons[kind.reason] += kind.calls
    cards = [
        _policy_card(policy, list(own), [row for row in promoted if row.policy == policy])
        | {"lift": compare_rewards(*lifts[policy]) if policy in lifts else None}
        for policy, own in groupby(rows, key=lambda row: row.policy)
    ]
    return part(
        request,
        "overview_figures.html",
        calls=reasons.total(),
        calls_since=min((kind.first_at for kind in kinds), default=None),
        side=reasons.pop(SIDE, 0),
        trainable=reasons.pop(None, 0),
        reasons=reasons.most_common(),
        cards=sorted(cards, key=lambda card: -card["episodes"]),
        since=since,
        most_episodes=MOST_COUNTED,
    )


def compare_rewards(new: Rewards, old: Rewards) -> dict[str, Any]:
    """Return whether new rewards are `better` than old ones, `worse` or `unclear` (pure)."""
    lift, word = new.lift_over(old), "unclear"
    if lift is not None and (lift.low > 0 or lift.high < 0):
        word = "better" if lift.low > 0 else "worse"
    return {"word": word, "new": new, "old": old, "lift": lift}


def _policy_card(policy: str, rows: Rows, promoted: Rows) -> dict[str, Any]:
    """Return a policy's card, from its rows of `count_outcomes` and of `newest_promotions`."""
    times: dict[Any, dict[str, Rewards]] = {}
    for row in rows:
        if row.scored:
            times.setdefault(row.part, {})[row.split] = rewards_from_row(row)
    fates = [row for row in rows if row.state is not None]

    def series(split: str, **more: Any) -> dict[str, Any]:
        means = [line.get(split, NO_REWARDS) for line in times.values()]
        names = (("values", "mean"), ("low", "low"), ("high", "high"))
        return {name: [getattr(mean, key) for mean in means] for name, key in names} | more

    values = [mean.mean or 0.0 for line in times.values() for mean in line.values()]
    return {
        "policy": policy,
        "episodes": sum(row.episodes for row in fates),
        "trained": sum(row.episodes for row in fates if row.state == "trained"),
        "fates": [row for row in fates if row.state != "trained"],
        "times": times,
        "chart": {
            "kind": "lines",
            "x": [at.timestamp() for at in times],
            "series": [series(TRAIN, name="live"), series(EVAL, name="held out", dashed=True)],
            "marks": [
                {"x": row.at.timestamp(), "label": f"@{row.version}"} for row in promoted[::-1]
            ],
            # 0 to 1, extended for rewards of another scale.
            "range": [min([0.0, *values]), max([1.0, *values])],
        },
    }


ROUTES: Final = [
    Route("/", overview, name="overview"),
    Route("/overview/doctor", doctor, name="overview_doctor"),
    Route("/overview/figures", figures, name="overview_figures"),
]
