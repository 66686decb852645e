"""Show the updates of a policy: their figures over time, and what became of the episodes."""

from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pawl.console.pages import Refusal, figure, page, reading, uuid_in, viewer
from pawl.console.versions import chosen_policy
from store.read.lineage import (
    MOST_MEMBERS,
    Member,
    UpdateFigures,
    members_of,
    one_update,
    outcomes_of,
    updates_of,
)
from store.version_queries import list_events
from store.versions import PolicyEvent
from trainer.trackers import BY_ID

TITLE: Final = "Updates"
MOST: Final = 100
# The plots: what each is about, and its lines by the figures' names.
PLOTS: Final[Mapping[str, Mapping[str, str]]] = {
    "Reward of the batch": {"reward_mean": "mean reward"},
    "Loss": {"loss": "loss"},
    "KL, nats a token": {"kl_to_base": "to the base model", "drift_kl": "server to trainer"},
    "Effective sample size": {"effective_sample_size": "share of the tokens"},
    "Clipped": {
        "clip_share": "clipped tokens",
        "ratio_cut_share": "ratios cut",
        "masked_share": "calls masked",
    },
    "Tokens a second": {"tokens_per_second": "distinct tokens trained"},
    "Seconds": {"seconds": "from the claim to the end", "train_seconds": "training"},
}


def plots_of(updates: Sequence[UpdateFigures]) -> dict[str, dict[str, Any]]:
    """Return the plots that have a point, as `console.js` draws them, the oldest first (pure)."""
    line = [one for one in reversed(updates) if one.state == "done"]
    figures = [{"seconds": seconds_of(one), **one.metrics} for one in line]
    found = {}
    for title, lines in PLOTS.items():
        series = [
            {"name": label, "values": [one.get(name) for one in figures]}
            for name, label in lines.items()
        ]
        series = [one for one in series if any(value is not None for value in one["values"])]
        if series:
            at = [round(one.claimed_at.timestamp(), 3) for one in line]
            found[title] = {"kind": "lines", "small": True, "x": at, "series": series}
    return found


def seconds_of(update: UpdateFigures) -> float | None:
    """Return how long an update took, from its claim to its end; None while it runs (pure)."""
    if update.finished_at is None:
        return None
    return (update.finished_at - update.claimed_at).total_seconds()


def stages_of(update: UpdateFigures, events: Sequence[PolicyEvent]) -> dict[str, float]:
    """Return where the time went, in seconds by stage, as far as it is known (pure).

    `events` are those of the update's version.
    """
    stages: dict[str, float] = {}
    took, trained = seconds_of(update), update.metrics.get("train_seconds")
    if took is not None and trained is not None:
        stages = {"read, planned and written": max(took - trained, 0.0), "trained": trained}
    elif took is not None:
        stages = {"read and planned": took}
    first: dict[str, PolicyEvent] = {}
    for event in sorted(events, key=lambda one: one.id):
        first.setdefault(event.to_state, event)
    loaded, tried = first.get("loaded"), first.get("canary") or first.get("serving")
    if loaded is not None and update.finished_at is not None:
        stages["loaded and probed"] = (loaded.at - update.finished_at).total_seconds()
        if tried is not None:
            stages["waited for traffic"] = (tried.at - loaded.at).total_seconds()
    return stages


def flat(value: object, before: str = "") -> Iterator[tuple[str, str]]:
    """Yield the values of nested tables by path, each as JSON (pure)."""
    if isinstance(value, Mapping) and value:
        for name in sorted(value):
            yield from flat(value[name], f"{before}.{name}" if before else str(name))
    else:
        yield before, msgspec.json.encode(value).decode()


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the keys in which two recipes differ, with both values as JSON (pure)."""
    old, new = dict(flat(before)), dict(flat(now))
    return [
        (key, old.get(key, "–"), new.get(key, "–"))
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def groups_of(members: Sequence[Member]) -> dict[str | None, list[Member]]:
    """Return the episodes of an update by task (pure)."""
    groups: dict[str | None, list[Member]] = {}
    for member in members:
        groups.setdefault(member.task, []).append(member)
    return groups


def _as_figure(value: str) -> str:
    """Return a value in JSON as people read it, a number with six digits."""
    try:
        return figure(float(value), 6)
    except ValueError:
        return value.strip('"')


async def updates(request: Request) -> Response:
    """List the updates of a policy."""
    before = uuid_in(request.query_params.get("before"))
    async with reading(request) as connection:
        policy, known = await chosen_policy(request, connection, viewer(request).tenant)
        if policy is None:
            return page(request, "updates.html", policy=None, policies=known)
        found = await updates_of(connection, policy.name, before, MOST)
        outcomes = await outcomes_of(connection, [one.id for one in found])
    untrained: dict[str, int] = {}
    for came_to in outcomes.values():
        for reason, episodes in came_to.items():
            untrained[reason] = untrained.get(reason, 0) + episodes
    return page(
        request,
        "updates.html",
        policy=policy,
        policies=known,
        updates=found,
        outcomes=outcomes,
        trained=untrained.pop("trained", 0),
        untrained=sorted(untrained.items(), key=lambda one: -one[1]),
        plots=plots_of(found),
        seconds_of=seconds_of,
        older=found[-1].id if len(found) == MOST else None,
        is_newest=before is None,
    )


async def update(request: Request) -> Response:
    """Show one update: its claim, its figures, and what became of each episode.

    Raises:
        Refusal: there is no such update, or it is another tenant's.
    """
    async with reading(request) as connection:
        found = await one_update(connection, request.path_params["id"], viewer(request).tenant)
        if found is None:
            raise Refusal(HTTPStatus.NOT_FOUND, "There is no such update")
        one, recipe, before = found
        members = await members_of(connection, one.id)
        events = []
        if one.version is not None:
            events = await list_events(connection, one.policy, one.version)
    figures = {name: value for name, value in one.metrics.items() if name not in BY_ID}
    return page(
        request,
        "update.html",
        update=one,
        figures=[(name, _as_figure(value)) for name, value in flat(figures) if value != "null"],
        stages=stages_of(one, events),
        recipe=dict(flat(recipe)),
        differences=[] if before is None else differences(before, recipe),
        groups=groups_of(members),
        members=len(members),
        is_cut=len(members) == MOST_MEMBERS,
    )


ROUTES: Final = [
    Route("/updates", updates, name="updates"),
    Route("/updates/{id:uuid}", update, name="update"),
]
