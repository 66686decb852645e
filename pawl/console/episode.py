"""The screen Episode: its calls on one time axis, what each added, and what became of it.

What a page shows of the texts is limited (`Space`), with the raw bytes a link away. Credit and
sampled tokens are parts that are loaded by themselves.
"""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime
from http import HTTPStatus
from typing import Any, Final
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pawl.console.conversation import Added, Said, Space, added, asked_in, reply_in
from pawl.console.pages import Refusal, page, part, reading, uuid_in, viewer
from pawl.console.worth import explained_for, worth_of
from store.errors import Damaged
from store.ids import time_of
from store.read.detail import (
    CallHead,
    CallTexts,
    EpisodeDetail,
    Fate,
    Stated,
    call_texts,
    episode_detail,
    raw_body,
)
from store.records import EVAL, Record
from store.tenants import bare, tenant_of

# The navigation has no entry for one episode.
TITLE: Final = ""
CALLS_A_PAGE: Final = 20
# What a page has room for, and of one text, in characters; one takes up to eight bytes of a page.
ROOM: Final = 160_000
EACH: Final = 3000
MOST_LANES: Final = 12
# Of the marks of tools, and of those of feedback.
MOST_MARKS: Final = 300
# The least width of a call on the time axis, in percent.
LEAST_WIDTH: Final = 0.4


# The time axis


class Mark(Record, frozen=True, kw_only=True):
    """Place something on a lane: from `x`, over `width`, in percent; `number` is the call's."""

    x: float
    width: float
    look: str
    title: str
    number: int | None = None
    call: UUID | None = None


class Lanes(Record, frozen=True, kw_only=True):
    """Hold the marks of each agent, and of feedback, between two times; `ticks` are in seconds.

    `more` counts tools and statements without a mark.
    """

    lanes: tuple[tuple[str, tuple[Mark, ...]], ...]
    ticks: tuple[tuple[float, float], ...]
    more: int = 0


def look_of(call: CallHead) -> str:
    """Return how a call is coloured: it counts not, it failed, it can be trained or it cannot."""
    if call.repeated_by is not None:
        return "again"
    if call.status != "complete" or (call.http_status or 0) >= HTTPStatus.BAD_REQUEST:
        return "bad"
    return "good" if call.trainable else "plain"


def lanes_of(calls: Sequence[CallHead], statements: Sequence[Stated], earlier: int = 0) -> Lanes:
    """Return a lane for each agent, in the order of their first calls, and one for feedback.

    `earlier` calls come before these.
    """
    if not calls:
        return Lanes(lanes=(), ticks=())
    begin = min(call.started_at for call in calls)
    length = max((call.started_at - begin).total_seconds() + call.total_ms / 1e3 for call in calls)
    length = max(length, 1e-3)

    def at(moment: datetime) -> float:
        share = (moment - begin).total_seconds() / length
        return round(100 * min(max(share, 0.0), 1.0), 3)

    lanes: dict[str, list[Mark]] = {}
    tools = 0
    for number, call in enumerate(calls, start=earlier + 1):
        agent = call.agent
        if agent not in lanes and len(lanes) >= MOST_LANES:
            agent = "(others)"
        lane = lanes.setdefault(agent, [])
        width = max(100 * call.total_ms / 1e3 / length, LEAST_WIDTH)
        x = min(at(call.started_at), 100 - LEAST_WIDTH)
        title = (
            f"call {number}, {call.total_ms / 1e3:.2f} s, {call.sampled_tokens} tokens: "
            f"{call.reason or ('trainable' if call.trainable else call.status)}"
        )
        lane.append(
            Mark(
                x=x,
                width=round(min(width, 100 - x), 3),
                look=look_of(call),
                title=title,
                number=number,
                call=call.id,
            )
        )
        for event in call.tool_events[: max(MOST_MARKS - tools, 0)]:
            look = "ok" if event.status == "ok" else "failed"
            title = f"{(event.name or 'a tool')[:80]}: {event.status}"
            lane.append(Mark(x=at(time_of(event.id)), width=0.0, look=look, title=title))
        tools += len(call.tool_events)
    said = [
        Mark(x=at(one.at), width=0.0, look="said", title=f"{one.metric[:80]} = {one.value}"[:160])
        for one in statements[-MOST_MARKS:]
    ]
    ticks = tuple((25.0 * step, length * step / 4) for step in range(5))
    return Lanes(
        lanes=tuple((agent, tuple(marks)) for agent, marks in lanes.items())
        + ((("feedback", tuple(said)),) if said else ()),
        ticks=ticks,
        more=sum(max(count - MOST_MARKS, 0) for count in (tools, len(statements))),
    )


# The calls of a page


class CallView(Record, frozen=True, kw_only=True):
    """Hold what a page shows of a call; `added` is None if its request cannot be taken apart."""

    number: int
    head: CallHead
    base: UUID | None
    added: Added | None
    reply: tuple[Said, ...]
    statements: tuple[Stated, ...]


def bases_of(calls: Sequence[CallHead]) -> dict[UUID, UUID | None]:
    """Return the call that each one is shown as an addition to.

    It is the one that it is stored as an addition to, or else the one before of its agent.
    """
    newest: dict[str, UUID] = {}
    bases: dict[UUID, UUID | None] = {}
    for call in calls:
        bases[call.id] = call.parent_id or newest.get(call.agent)
        newest[call.agent] = call.id
    return bases


def views_of(
    calls: Sequence[tuple[int, CallHead]],
    bases: Mapping[UUID, UUID | None],
    texts: Mapping[UUID, CallTexts],
    statements: Sequence[Stated],
    space: Space,
) -> list[CallView]:
    """Return what a page shows of its calls, each with its number, as far as there is room."""
    views = []
    for number, head in calls:
        own, base = texts.get(head.id), bases.get(head.id)
        before = texts.get(base) if base is not None else None
        asked = asked_in(head.dialect, own.request if own else None)
        new = None
        if asked is not None:
            was = asked_in(head.dialect, before.request) if before else None
            new = added(asked, was, reply_in(before.reply if before else None))
            new = msgspec.structs.replace(new, said=space.fit(new.said))
        reply = space.fit(reply_in(own.reply if own else None))
        views.append(
            CallView(
                number=number,
                head=head,
                base=base,
                added=new,
                reply=reply,
                statements=tuple(one for one in statements if one.call == head.id),
            )
        )
    return views


async def episode(request: Request) -> Response:
    """Show an episode, with the texts of `CALLS_A_PAGE` of its calls."""
    first = uuid_in(request.query_params.get("from"))
    async with reading(request) as connection:
        detail = await _detail(request, connection, None)
        places = {call.id: place for place, call in enumerate(detail.calls)}
        if first is not None and first not in places and detail.goes_on_from is not None:
            detail = await _detail(request, connection, first)
            places = {call.id: place for place, call in enumerate(detail.calls)}
        start = places.get(first, 0) if first is not None else 0
        end = start + CALLS_A_PAGE
        bases = bases_of(detail.calls)
        wanted = {call.id for call in detail.calls[start:end]}
        wanted |= {base for call in wanted if (base := bases[call]) is not None}
        texts = await call_texts(connection, wanted)
    numbers = list(enumerate(detail.calls, start=detail.earlier_calls + 1))
    shown = numbers[start:end]
    space = Space(ROOM, EACH)
    # Megabytes are decoded: other pages go on.
    views = await asyncio.to_thread(views_of, shown, bases, texts, detail.statements, space)
    return page(
        request,
        "episode.html",
        screen="episodes",
        episode=detail,
        key=bare(detail.key),
        tenant=tenant_of(detail.key),
        task=detail.task and bare(detail.task),
        lanes=lanes_of(detail.calls, detail.statements, detail.earlier_calls),
        calls=views,
        numbers={call.id: number for number, call in numbers},
        waits={fate.policy: waits_for(fate, detail) for fate in detail.fates},
        pages=[call.id for call in detail.calls[::CALLS_A_PAGE]],
        a_page=CALLS_A_PAGE,
        before=detail.calls[max(start - CALLS_A_PAGE, 0)].id if start else None,
        after=detail.calls[end].id if end < len(detail.calls) else detail.goes_on_from,
        groups={fate.policy: _group_of(fate, detail) for fate in detail.fates},
    )


def _group_of(fate: Fate, detail: EpisodeDetail) -> dict[str, Any]:
    """Return the query of the screen Group for the attempts that it is compared with."""
    group = {"policy": fate.policy, "task": detail.task}
    return group if fate.update_id is None else group | {"update": fate.update_id}


async def _detail(
    request: Request, connection: AsyncConnection, since: UUID | None
) -> EpisodeDetail:
    """Return the episode that is asked for.

    Raises:
        Refusal: there is none, or the viewer may not know of it, or it cannot be read back.
    """
    try:
        found = await episode_detail(connection, request.path_params["id"], since)
    except Damaged as error:
        raise Refusal(HTTPStatus.CONFLICT, "The episode cannot be read back", str(error)) from error
    tenant = viewer(request).tenant
    if found is None or tenant not in (None, tenant_of(found.key)):
        raise Refusal(HTTPStatus.NOT_FOUND, "There is no such episode", "It may have been deleted.")
    return found


# What came of it


def waits_for(fate: Fate, episode: EpisodeDetail) -> str:
    """Return why an episode is not consumed for a policy yet, in words; "" if it is."""
    if fate.trained is not None:
        return ""
    if fate.update_id is not None:
        return "an update holds it, and is training"
    reasons = (
        (episode.split == EVAL, "it is evaluation, which is never trained on"),
        (episode.quarantined_reason, f"it is set aside: {episode.quarantined_reason}"),
        (fate.lacks == "missing_metric", "a metric that its reward is the sum of was not stated"),
        (fate.lacks == "undeclared_text", "its recipe gives no value to a text that was stated"),
        (not fate.scored, "nobody has scored it yet"),
        (fate.rolled_back, "a version that sampled it was rolled back"),
        (fate.set_aside, "it was sampled while a model server was at fault"),
        (episode.task is None, f"it has no task; updates took groups of {fate.group_size or '?'}"),
    )
    for applies, why in reasons:
        if applies:
            return why
    size = f" of the {fate.group_size} that the last update took" if fate.group_size else ""
    return f"it waits for the next update: {fate.ready} scored attempts at its task wait{size}"


async def credit(request: Request) -> Response:
    """Show why the calls of an episode have their advantage, for each policy that consumed it."""
    async with reading(request) as connection:
        detail = await _detail(request, connection, None)
    numbers = {call.id: number for number, call in enumerate(detail.calls, start=1)}
    shown = []
    for fate in detail.fates:
        if fate.update_id is None or fate.update_state != "done":
            continue
        explained, why = await explained_for(request, fate.update_id)
        worth = [] if explained is None else worth_of(explained, detail.id, numbers)
        shown.append((fate, worth, explained, why))
    return part(request, "episode_credit.html", episode=detail, shown=shown)


async def raw(request: Request) -> Response:
    """Return a request or a reply, byte for byte, as a file."""
    call, which = request.path_params["id"], request.path_params["part"]
    body = None
    if which in ("request", "reply"):
        async with reading(request) as connection:
            body = await raw_body(connection, call, which, viewer(request).tenant)
    if body is None:
        raise Refusal(
            HTTPStatus.NOT_FOUND, "There are no such bytes", "The call has none, or is gone."
        )
    headers = {
        "Content-Disposition": f'attachment; filename="{call}-{which}.txt"',
        "X-Content-Type-Options": "nosniff",
    }
    return Response(body, media_type="text/plain; charset=utf-8", headers=headers)


ROUTES: Final = [
    Route("/episodes/{id:uuid}", episode, name="episode"),
    Route("/episodes/{id:uuid}/credit", credit, name="episode_credit"),
    Route("/calls/{id:uuid}/{part}", raw, name="raw"),
]
