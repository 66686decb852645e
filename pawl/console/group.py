"""The screen Group: the attempts at one task side by side, and where they part."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from os.path import commonprefix
from typing import Any, Final, NamedTuple
from uuid import UUID

from sqlalchemy import Row
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pawl.console.conversation import Message, Space, Turn
from pawl.console.episode import bases_of, turns_of
from pawl.console.pages import Refusal, page, reading, uuid_in, viewer
from store.read.detail import FIRST_CALLS, attempts, first_calls, group_updates
from store.tenants import SEPARATOR, scoped, tenant_of


class Spoken(NamedTuple):
    """Hold a message of an attempt, and in which of its calls it was asked or answered."""

    call: int
    is_reply: bool
    message: Message


class Parting(NamedTuple):
    """State where attempts part: after `same` messages, and after so many `characters` of the next.

    `last` is the last message that is the same. `next` has the one after it of each attempt; None:
    it ended there.
    """

    same: int
    last: Message | None
    characters: int
    next: Mapping[UUID, Spoken | None]


def spoken_in(calls: Sequence[Row[Any]], turns: Mapping[UUID, Turn]) -> list[Spoken]:
    """Return what was said in the first calls of an attempt, each message once, in its order."""
    spoken: list[Spoken] = []
    for number, call in enumerate(calls, start=1):
        turn = turns[call.id]
        spoken += [Spoken(number, False, message) for message in turn.messages or ()]
        spoken += [Spoken(number, True, message) for message in turn.reply]
    return spoken


def parting_of(attempts: Mapping[UUID, Sequence[Spoken]]) -> Parting | None:
    """Return where attempts part; None if all are the same."""
    last = None
    for place, spoken in enumerate(zip_longest(*attempts.values())):
        if len({own and own.message.words for own in spoken}) > 1:
            texts = [
                "".join(part.text for part in own.message.parts) if own else "" for own in spoken
            ]
            characters = len(commonprefix(texts))  # noqa: RUF071 (they are no paths)
            return Parting(place, last, characters, dict(zip(attempts, spoken, strict=True)))
        last = spoken[0].message
    return None


async def group(request: Request) -> Response:
    """Show the attempts at a task that an update held, or those that wait for one.

    Raises:
        Refusal: the policy or the task lacks, or the viewer may not know of it.
    """
    asked, tenant = request.query_params, viewer(request).tenant
    policy, task = asked.get("policy", ""), asked.get("task", "")
    if tenant is not None and SEPARATOR not in task:
        task = scoped(tenant, task)
    if not policy or not task or "\0" in policy + task or tenant not in (None, tenant_of(task)):
        raise Refusal(404, "There is no such group", "A group is named by a policy and a task.")
    update = uuid_in(asked.get("update"))
    async with reading(request) as connection:
        members = await attempts(connection, policy, task, update)
        updates = await group_updates(connection, policy, task)
        calls = await first_calls(connection, [member.id for member in members])
        bases = {call: base for own in calls.values() for call, base in bases_of(own).items()}
        turns = await turns_of(connection, [call for own in calls.values() for call in own], bases)
    return page(
        request,
        "group.html",
        screen="episodes",
        policy=policy,
        task=task,
        update=update,
        members=members,
        updates=updates,
        parting=parting_of({attempt: spoken_in(own, turns) for attempt, own in calls.items()}),
        compared=FIRST_CALLS,
        space=Space(),
    )


ROUTES: Final = [Route("/groups", group, name="group")]
