"""Show the updates of a policy: their figures over time, and the outcomes of their episodes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from sqlalchemy import Row
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from console.pages import Refusal, page, reading, uuid_in, viewer_of
from console.versions import chosen_policy
from store.read.lineage import MOST_MEMBERS, episodes_of_update, read_update, updates_of
from trainer.metrics import FIGURE_DESCRIPTIONS
from trainer.trackers import BY_ID, flatten

PAGE_SIZE: Final = 100
FAMILIES: Final = "Reward by family of tasks"
# The plots and lists: for each title, its figures by name, with their labels. The figures of
# FAMILIES depend on the updates.
SHOWN_FIGURES: Final[Mapping[str, Mapping[str, str]]] = {
    "Reward of the batch": {"reward_mean": "mean reward"},
    FAMILIES: {},
    "Entropy, nats a token": {"entropy": "of the policy"},
    "Loss": {"loss": "loss"},
    "KL, nats a token": {
        "kl_to_base": "to the base model",
        "teacher_kl": "to the teacher",
        "drift_kl": "server to trainer",
    },
    "Effective sample size": {"effective_sample_size": "share of the tokens"},
    "Clipped": {
        "clip_share": "clipped tokens",
        "ratio_cut_share": "ratios cut",
        "masked_share": "calls masked",
    },
    "Tokens a second": {"tokens_per_second": "distinct tokens trained"},
    "Seconds": {"seconds": "from the claim to the end", "train_seconds": "training"},
}


def plotted_figures(updates: Sequence[Row[Any]]) -> dict[str, Mapping[str, str]]:
    """Return `SHOWN_FIGURES`, with each task family's reward if the updates have several."""
    families = sorted({one for own in updates for one in own.metrics.get("families", {})})
    lines = {f"families/{one}/reward": one or "(none)" for one in families}
    shown = {**SHOWN_FIGURES, FAMILIES: lines if len(lines) > 1 else {}}
    return {title: lines for title, lines in shown.items() if lines}


def plots_of(updates: Sequence[Row[Any]]) -> dict[str, dict[str, Any]]:
    """Return the plots that have a point, as `console.js` reads them, oldest first (pure)."""
    done = [update for update in reversed(updates) if update.state == "done"]
    x = [round(update.claimed_at.timestamp(), 3) for update in done]
    figures = [dict(flatten(update.metrics)) for update in done]
    plots = {}
    for title, lines in plotted_figures(done).items():
        series = [
            {"name": label, "values": [own.get(name) for own in figures]}
            for name, label in lines.items()
        ]
        series = [line for line in series if any(value is not None for value in line["values"])]
        if series:
            plots[title] = {"kind": "lines", "small": True, "x": x, "series": series}
    return plots


async def updates(request: Request) -> Response:
    before = uuid_in(request.query_params.get("before"))
    async with reading(request) as connection:
        policy, known = await chosen_policy(request, connection, viewer_of(request).tenant)
        name = "" if policy is None else policy.name
        rows = await updates_of(connection, name, before, PAGE_SIZE, BY_ID)
    return page(
        request,
        "updates.html",
        policy=policy,
        policies=known,
        updates=rows,
        outcomes=sum((Counter(row.outcomes) for row in rows), Counter()).most_common(),
        shown=plotted_figures(rows),
        flatten=flatten,
        plots=plots_of(rows),
        older=rows[-1].id if len(rows) == PAGE_SIZE else None,
    )


async def update(request: Request) -> Response:
    """Show one update: its claim, its figures, and the outcome of each episode.

    Raises:
        Refusal: there is no such update, or it is another tenant's.
    """
    of, tenant = request.path_params["id"], viewer_of(request).tenant
    async with reading(request) as connection:
        row = await read_update(connection, of, tenant, BY_ID)
        if row is None:
            raise Refusal(404, "There is no such update")
        members = await episodes_of_update(connection, row.id)
    return page(
        request,
        "update.html",
        update=row,
        figures=[
            (name, value, FIGURE_DESCRIPTIONS.get(name.partition("/")[0], ""))
            for name, value in sorted(flatten(row.metrics))
        ],
        groups=[(task, list(own)) for task, own in groupby(members, lambda row: row.task)],
        is_cut=len(members) == MOST_MEMBERS,
    )


ROUTES: Final = [
    Route("/updates", updates, name="updates"),
    Route("/updates/{id:uuid}", update, name="update"),
]
