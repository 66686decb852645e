"""The screen Group: the attempts at one task side by side, and where they part."""

import asyncio
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final
from uuid import UUID

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pawl.console.conversation import Said, Space, added, asked_in, reply_in
from pawl.console.pages import Refusal, page, part, reading, uuid_in, viewer
from pawl.console.worth import explained_for
from store.read.detail import (
    FIRST_CALLS,
    CallTexts,
    attempts,
    call_texts,
    first_calls,
    group_updates,
)
from store.records import Record
from store.tenants import SEPARATOR, bare, scoped, tenant_of
from trainer.credit.assign import TransitionCredit

TITLE: Final = ""
# Calls whose texts are read at once, of each attempt; most attempts part within the first.
AT_ONCE: Final = 3
# Of the texts in which attempts part, in characters: for the page, and of one.
ROOM: Final = 160_000
EACH: Final = 4000


class Message(Record, frozen=True, kw_only=True):
    """Hold a message of an attempt, and in which of its calls it was asked or answered."""

    call: int
    is_reply: bool
    said: Said


class Parting(Record, frozen=True, kw_only=True):
    """State where attempts part: after `same` messages, and after so many `characters` of the next.

    `last` is the last message that is the same. `next` has the one after it of each attempt; None:
    it ended there.
    """

    same: int
    last: Said | None
    characters: int
    next: Mapping[UUID, Message | None]


def messages_of(calls: Sequence[Any], texts: Mapping[UUID, CallTexts]) -> list[Message]:
    """Return what was said in the first calls of an attempt, each message once, in its order."""
    newest: dict[str, UUID] = {}
    said: list[Message] = []
    for number, call in enumerate(calls, start=1):
        base = texts.get(call.parent_id or newest.get(call.agent) or call.id)
        own = texts[call.id]
        asked = asked_in(call.dialect, own.request)
        before = None if base is own or base is None else base
        if asked is not None:
            was = None if before is None else asked_in(call.dialect, before.request)
            new = added(asked, was, reply_in(before.reply if before else None))
            said += [Message(call=number, is_reply=False, said=one) for one in new.said]
        said += [Message(call=number, is_reply=True, said=one) for one in reply_in(own.reply)]
        newest[call.agent] = call.id
    return said


def parting_of(attempts: Mapping[UUID, Sequence[Message]]) -> Parting | None:
    """Return where attempts part; None if one is no more than the beginning of all others."""
    longest = max(map(len, attempts.values()), default=0)
    for place in range(longest):
        at = {
            attempt: said[place] if place < len(said) else None
            for attempt, said in attempts.items()
        }
        if len({one and one.said.words for one in at.values()}) > 1:
            texts = [
                "".join(part.text for part in one.said.parts) if one else "" for one in at.values()
            ]
            last = next(iter(attempts.values()))[place - 1].said if place else None
            return Parting(same=place, last=last, characters=_shared(texts), next=at)
    return None


def _shared(texts: Sequence[str]) -> int:
    """Return how many characters all texts begin with."""
    least, most = min(texts), max(texts)
    pairs = zip(least, most, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), len(least))


def _named(request: Request) -> tuple[str, str, UUID | None]:
    """Return the policy, the task (as it is kept) and the update that an address names.

    Raises:
        Refusal: one lacks, or the viewer may not know of it.
    """
    asked, tenant = request.query_params, viewer(request).tenant
    policy, task = asked.get("policy", ""), asked.get("task", "")
    if tenant is not None and SEPARATOR not in task:
        task = scoped(tenant, task)
    if not policy or not task or "\0" in policy + task or tenant not in (None, tenant_of(task)):
        raise Refusal(
            HTTPStatus.NOT_FOUND,
            "There is no such group",
            "A group is the attempts at a task: it is named by a policy and a task.",
        )
    return policy, task, uuid_in(asked.get("update"))


async def group(request: Request) -> Response:
    """Show the attempts at a task that an update held, or those that wait for one."""
    policy, task, update = _named(request)
    async with reading(request) as connection:
        members = await attempts(connection, policy, task, update)
        updates = await group_updates(connection, policy, task)
        calls = await first_calls(connection, [one.id for one in members])
        parting, compared = None, 0
        texts: dict[UUID, CallTexts] = {}
        while len(members) > 1 and parting is None and compared < FIRST_CALLS:
            compared += AT_ONCE
            wanted = {call.id for own in calls.values() for call in own[:compared]}
            wanted |= {
                call.parent_id
                for own in calls.values()
                for call in own[:compared]
                if call.parent_id
            }
            texts |= await call_texts(connection, wanted - texts.keys())
            said = {
                one: await asyncio.to_thread(messages_of, own[:compared], texts)
                for one, own in calls.items()
            }
            parting = parting_of(said)
            if all(len(own) <= compared for own in calls.values()):
                break
    space = Space(ROOM, EACH)
    shown: dict[UUID, Message | None] = {}
    for one, message in (parting.next if parting else {}).items():
        shown[one] = message and msgspec.structs.replace(message, said=space.fit([message.said])[0])
    last = space.fit([parting.last]) if parting and parting.last else ()
    return page(
        request,
        "group.html",
        screen="episodes",
        policy=policy,
        task=task,
        named=bare(task),
        update=update,
        members=members,
        updates=updates,
        parting=parting,
        shown=shown,
        last=last,
        compared=compared,
    )


async def credit(request: Request) -> Response:
    """Show what the attempts at a task were worth to an update."""
    _, task, update = _named(request)
    if update is None:
        raise Refusal(HTTPStatus.NOT_FOUND, "No update is named")
    explained, why = await explained_for(request, update)
    worth: dict[UUID, list[TransitionCredit]] = {}
    if explained is not None:
        members = {one for name, own, _ in explained.groups if name == task for one in own}
        for one in explained.credited:
            if one.episode_id in members:
                worth.setdefault(one.episode_id, []).append(one)
    return part(request, "group_credit.html", worth=worth, why=why)


ROUTES: Final = [
    Route("/groups", group, name="group"),
    Route("/groups/credit", credit, name="group_credit"),
]
