"""The screen Episode: its calls on one time axis, what each added, and the outcome per policy.

A page shows a limited amount of text (`Space`) and links to the raw bytes. Credit and sampled
tokens are parts that are loaded separately.
"""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple
from uuid import UUID

from sqlalchemy import Row
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from console.conversation import NO_TEXTS, Space, Turn, turn_of
from console.pages import Refusal, console_of, page, part, reading, uuid_in, viewer_of
from pawl.credit import ExplainedUpdate, explain_past
from store.errors import Damaged, UnknownUpdate
from store.read.detail import (
    CallTexts,
    EpisodeDetail,
    call_texts,
    episode_detail,
    is_explainable,
    raw_body,
)
from store.read.facts import compacted_by
from store.read.lineage import read_update
from store.read.past import past_update
from store.records import EVAL
from store.tenants import tenant_of
from trainer.credit.assign import TransitionCredit
from trainer.credit.means import mean_of
from trainer.errors import TrainerError

CALLS_A_PAGE: Final = 20
MOST_LANES: Final = 12
# The least width of a call on the time axis, in percent.
LEAST_WIDTH: Final = 0.4


def numbers_of(episode: EpisodeDetail) -> dict[UUID, int]:
    """Return calls' numbers, from 1; as in credit, a repeated call has the next one's number."""
    number = episode.earlier_calls
    numbers: dict[UUID, int] = {}
    for call in episode.calls:
        numbers[call.id] = number + 1
        number += call.id not in episode.tools.repeated_by
    return numbers


# The time axis


class Mark(NamedTuple):
    """A call on a lane of the time axis; `x` and `width` are in percent."""

    x: float
    width: float
    colour: str
    title: str
    call: UUID


def call_colour(call: Row[Any], *, is_repeated: bool) -> str:
    """Return the CSS class for the colour of a call: repeated, failed, trainable or not."""
    if is_repeated:
        return "again"
    if call.status != "complete" or (call.http_status or 0) >= 400:
        return "bad"
    return "good" if call.trainable else "plain"


def lane_of(call: Row[Any]) -> str:
    return call.agent if call.lane is None else f"{call.agent} {call.lane}"


def lanes_of(episode: EpisodeDetail) -> tuple[dict[str, list[Mark]], float]:
    """Return the marks by lane, ordered by their first calls, and the axis' length in seconds.

    Each agent and each thread of a sub-agent has a lane; after MOST_LANES, the others share one.
    """
    if not episode.calls:
        return {}, 0.0
    begin: datetime = min(call.started_at for call in episode.calls)
    begun = [((call.started_at - begin).total_seconds(), call) for call in episode.calls]
    seconds = max(*(at + call.total_ms / 1e3 for at, call in begun), 1e-3)
    lanes: dict[str, list[Mark]] = {}
    numbers = numbers_of(episode)
    for at, call in begun:
        name = lane_of(call)
        is_other = len(lanes) >= MOST_LANES and name not in lanes
        lane = lanes.setdefault("(others)" if is_other else name, [])
        width = round(max(call.total_ms / 10 / seconds, LEAST_WIDTH), 3)
        x = round(min(100 * at / seconds, 100 - width), 3)
        colour = call_colour(call, is_repeated=call.id in episode.tools.repeated_by)
        state = call.reason or ("trainable" if call.trainable else call.status)
        length = f"{call.total_ms / 1e3:.2f} s, {call.sampled_tokens} tokens"
        lane.append(Mark(x, width, colour, f"call {numbers[call.id]}, {length}: {state}", call.id))
    return lanes, seconds


# The calls of a page


async def turns_of(
    connection: AsyncConnection, calls: Sequence[Row[Any]], shown: Sequence[Row[Any]]
) -> dict[UUID, Turn]:
    """Read the texts of the calls `shown`; return their turns.

    A call is compared with its stored parent, or without one, with the call before it in its lane.
    """
    newest: dict[str, UUID] = {}
    bases: dict[UUID, UUID | None] = {}
    for call in calls:
        bases[call.id] = call.parent_id or newest.get(lane_of(call))
        newest[lane_of(call)] = call.id
    wanted = {call for own in shown for call in (own.id, bases[own.id]) if call is not None}
    texts: Mapping[Any, CallTexts] = await call_texts(connection, wanted, wanted)

    def turn(call: Row[Any]) -> Turn:
        before = texts.get(bases[call.id], NO_TEXTS)
        return turn_of(texts.get(call.id, NO_TEXTS), before)

    # In a thread, as decoding megabytes would block other pages.
    return await asyncio.to_thread(lambda: {call.id: turn(call) for call in shown})


async def episode(request: Request) -> Response:
    """Show an episode, with the texts of `CALLS_A_PAGE` of its calls."""
    first = uuid_in(request.query_params.get("from"))
    async with reading(request) as connection:
        detail = await _detail(request, connection, None)
        if first is not None and detail.goes_on_from and first >= detail.goes_on_from:
            detail = await _detail(request, connection, first)
        calls, ids = detail.calls, [call.id for call in detail.calls]
        start = ids.index(first) if first in ids else 0
        end = start + CALLS_A_PAGE
        shown = calls[start:end]
        turns = await turns_of(connection, calls, shown)
    lanes, seconds = lanes_of(detail)
    return page(
        request,
        "episode.html",
        screen="episodes",
        episode=detail,
        tenant=tenant_of(detail.key),
        lanes=lanes,
        seconds=seconds,
        calls=shown,
        turns=turns,
        numbers=numbers_of(detail),
        lane_of=lane_of,
        compacted_by=compacted_by(calls),
        space=Space(),
        waits={fate.policy: why_not_consumed(fate, detail) for fate in detail.fates},
        before=ids[max(start - CALLS_A_PAGE, 0)] if start else None,
        after=ids[end] if end < len(ids) else detail.goes_on_from,
    )


async def _detail(
    request: Request, connection: AsyncConnection, since: UUID | None
) -> EpisodeDetail:
    """Return the requested episode.

    Raises:
        Refusal: it does not exist, is another tenant's, or cannot be read back.
    """
    try:
        detail = await episode_detail(connection, request.path_params["id"], since)
    except Damaged as error:
        raise Refusal(409, "The episode cannot be read back", str(error)) from error
    tenant = viewer_of(request).tenant
    if detail is None or tenant not in (None, tenant_of(detail.key)):
        raise Refusal(404, "There is no such episode", "It may have been deleted.")
    return detail


# Outcome


def why_not_consumed(fate: Row[Any], episode: EpisodeDetail) -> str:
    """Return in words why an episode is not consumed for a policy yet; "" if it is consumed."""
    reasons = (
        (fate.trained is not None, ""),
        (fate.update_id is not None, "an update has claimed it, and is training"),
        (episode.split == EVAL, "it is evaluation, which is never trained on"),
        (episode.quarantined_reason, f"it is quarantined: {episode.quarantined_reason}"),
        (fate.lacks == "missing_metric", "there is no feedback for a metric of its reward"),
        (fate.lacks == "undeclared_text", "its recipe gives no value for a text in its feedback"),
        (not fate.scored, "nobody has scored it yet"),
        (fate.rolled_back, "a version that sampled it was rolled back"),
        (fate.in_fault_time, "it was sampled while a model server was at fault"),
    )
    return next((why for applies, why in reasons if applies), "it waits for the next update")


# Why calls have their advantage: the arithmetic of `pawl credit`, a row for each step


def credit_rows(
    explained: ExplainedUpdate, episode: UUID | None, task: str | None, tenant: str | None
) -> list[dict[str, Any]]:
    """Return the credit of the tenant's calls of an episode, or of a task's episodes.

    Calls with equal arithmetic share a row. Its `returns` are those that the calls are compared
    with: of all attempts at the task, or of the agent in each. `earlier` counts attempts that
    earlier updates consumed.
    """
    by_agent = explained.recipe.credit.assignment == "per_agent"
    groups = explained.past.claim.groups
    place_of = {own.id: place for place, group in enumerate(groups) for own in group.episodes}
    returns: dict[Any, dict[UUID, list[float]]] = {}
    alike: dict[Any, list[TransitionCredit]] = {}
    for credit in explained.plan.credited:
        place = place_of[credit.episode_id]
        group = groups[place]
        # An episode without a task is not compared with others.
        among = place if group.task else credit.episode_id
        compared = among, credit.call.agent if by_agent else ""
        if credit.r_final is not None:
            of_episodes = returns.setdefault(compared, {})
            of_episodes.setdefault(credit.episode_id, []).append(credit.r_final)
        is_named = credit.episode_id == episode or bool(task and group.task == task)
        if is_named and tenant in (None, tenant_of(credit.episode)):
            figures = (credit.r_final, credit.r_air, credit.comparison, credit.advantage)
            parts = tuple(credit.parts.items())
            key = (compared, credit.episode_id, *figures, credit.reason, parts)
            alike.setdefault(key, []).append(credit)
    return [
        {
            "calls": format_ranges([credit.position + 1 for credit in own]),
            "weights": [credit.weight for credit in own],
            "corrections": sum(credit.correction for credit in own),
            "credit": own[0],
            "returns": [mean_of(values) for values in returns.get(compared, {}).values()],
            "earlier": len(groups[place_of[own[0].episode_id]].earlier),
        }
        for (compared, *_), own in alike.items()
    ]


def format_ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text, consecutive ones as a range."""
    known = set(numbers)
    starts = [number for number in numbers if number - 1 not in known]
    ends = [number for number in numbers if number + 1 not in known]
    pairs = zip(starts, ends, strict=True)
    return ", ".join(f"{start}" if start == end else f"{start} to {end}" for start, end in pairs)


async def explained_for(request: Request, update_id: UUID) -> tuple[ExplainedUpdate | None, str]:
    """Return the credit of an update and "", or None and why it cannot be shown.

    Takes the pool's only connection: the caller must not hold it.
    """
    tenant = viewer_of(request).tenant
    try:
        explained = await console_of(request).explained.get(
            (tenant, update_id), lambda: _explained(request, update_id, tenant)
        )
    except (UnknownUpdate, TrainerError, Damaged) as error:
        return None, str(error)
    return explained, ""


async def _explained(request: Request, update_id: UUID, tenant: str | None) -> ExplainedUpdate:
    async with reading(request) as connection:
        if await read_update(connection, update_id, tenant, ()) is None:
            raise UnknownUpdate(f"there is no update {update_id}")
        if not await is_explainable(connection, update_id):
            raise UnknownUpdate(
                f"it is too large to compute here: run `pawl credit --update {update_id}`"
            )
        past = await past_update(connection, update_id, tenant=tenant)
    return await asyncio.to_thread(explain_past, past)


async def credit(request: Request) -> Response:
    """Show why calls of an update have their advantage, for one episode or one task."""
    query, tenant = request.query_params, viewer_of(request).tenant
    episode, task = uuid_in(query.get("episode")), query.get("task")
    explained, why = await explained_for(request, request.path_params["id"])
    rows = [] if explained is None else credit_rows(explained, episode, task, tenant)
    return part(
        request, "credit.html", rows=rows, explained=explained, why=why, by_attempt=bool(task)
    )


# Bytes


async def raw(request: Request) -> Response:
    """Return a request or a reply, byte for byte, as a file."""
    call, which = request.path_params["id"], request.path_params["part"]
    body = None
    if which in ("request", "reply"):
        async with reading(request) as connection:
            body = await raw_body(connection, call, which, viewer_of(request).tenant)
    if body is None:
        raise Refusal(404, "There are no such bytes", "The call has none, or was deleted.")
    headers = {"Content-Disposition": f'attachment; filename="{call}-{which}.txt"'}
    return Response(body, media_type="text/plain; charset=utf-8", headers=headers)


ROUTES: Final = [
    Route("/episodes/{id:uuid}", episode, name="episode"),
    Route("/updates/{id:uuid}/credit", credit, name="credit"),
    Route("/calls/{id:uuid}/{part}", raw, name="raw"),
]
