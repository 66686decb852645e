"""Show the versions of policies, their line as a picture, and move the traffic between them.

A change is asked for twice. The first page does it in a transaction that it gives up, and shows
how the versions stand before and after; the second does it for good, unless it would come to
something else by then.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from hashlib import sha256
from typing import Any, Final

import msgspec
from msgspec.structs import replace
from sqlalchemy import Row
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from pawl.by_hand import (
    find_to_promote,
    freeze_by_hand,
    promote_as_seen,
    roll_back_by_hand,
)
from pawl.console.pages import (
    Refusal,
    console_of,
    figure,
    form,
    page,
    reading,
    require,
    viewer,
    writing,
)
from store.errors import NotGated, StateChanged, StoreError, UnknownNames, UnknownPolicy
from store.read.gates import gated
from store.read.lineage import line_of, newest_events, places_of, policies_of, rewards_of
from store.records import Record
from store.version_queries import list_events
from store.version_states import lock_policies
from store.versions import PolicyEvent

# Versions of one page, and events of one version.
MOST: Final = 40
MOST_EVENTS: Final = 50


def words_of(version: Row[Any]) -> list[str]:
    """Return how a version of `store.read.lineage` stands, the state first (pure)."""
    state = version.state.replace("_", " ")
    if version.share is not None:
        state = "control" if version.state == "retired" else state
        state += f" with {figure(100 * version.share)} % of new episodes"
    more = {
        "unloaded": version.unloaded_at,
        "ended": version.ended_at,
        "files deleted": version.files_deleted_at,
        "training held" if version.version else "policy frozen": version.frozen_at,
    }
    return [state, *(word for word, since in more.items() if since is not None)]


def actions_of(version: Row[Any]) -> list[str]:
    """Return what a person may do with a version (pure): the functions behind refuse the rest."""
    there = version.ended_at is None and version.files_deleted_at is None
    may = {
        "promote": version.state in ("loaded", "canary", "retired") and there,
        "rollback": version.state in ("loaded", "canary", "serving") and version.version > 0,
    }
    return [action for action, holds in may.items() if holds]


# What a change comes to


class Change(Record, frozen=True, kw_only=True):
    """Say what is to be done with a version, and why.

    Once it was done, or tried, the rest says what it comes to. `moved` has each version that stands
    otherwise than before, with how it stood and how it stands. `waits` is the event, with evidence,
    by which the version to promote waits for a person.
    """

    action: str
    policy: str
    number: int
    reason: str = "by hand"
    moved: tuple[tuple[int, list[str], list[str]], ...] = ()
    waits: PolicyEvent | None = None

    @property
    def named(self) -> str:
        """Return the version as commands name it."""
        return f"{self.policy}@{self.number}"

    @property
    def digest(self) -> str:
        """Return what tells this change from all others that a person may confirm."""
        moved = [(number, now) for number, _, now in self.moved]
        seen = [self.action, self.named, moved, self.waits and self.waits.id]
        return sha256(msgspec.json.encode(seen)).hexdigest()[:24]


async def carry_out(connection: AsyncConnection, change: Change, tenant: str | None) -> Change:
    """Do what a change says in the caller's transaction, and return it with what it came to.

    Raises:
        StoreError: it cannot be done; the message says why.
        Refusal: the tenant (None: anybody) has no such version, or there is no such action.
    """
    await own_version(connection, change.policy, change.number, tenant)
    await lock_policies(connection, [change.policy])
    places = await places_of(connection, change.policy, [change.number])
    before = {number: words_of(version) for number, version in places.items()}
    match change.action:
        case "promote":
            start, waits = await find_to_promote(connection, change.named, tenant)
            if start.unloaded:
                command = f"`pawl policies promote {change.named}`"
                raise NotGated(f"{change.named} is on no model server: {command} loads it first")
            evidence = None if waits is None else waits.evidence
            await promote_as_seen(connection, start, change.reason, evidence)
            change = replace(change, waits=waits)
        case "rollback":
            await roll_back_by_hand(connection, change.named, change.reason, tenant)
        case "freeze" | "unfreeze":
            frozen = change.action == "freeze"
            await freeze_by_hand(connection, change.policy, change.reason, tenant, frozen=frozen)
        case _:
            raise Refusal(404, "There is no such action", change.action)
    places = await places_of(connection, change.policy, before)
    after = {number: words_of(version) for number, version in places.items()}
    moved = tuple(
        (number, before[number], now)
        for number, now in after.items()
        if number in before and now != before[number]
    )
    if not moved:
        raise StateChanged(f"{change.action} of {change.named} changes nothing: it is so already")
    return replace(change, moved=moved)


# Pages


async def own_version(
    connection: AsyncConnection, policy: str, number: int, tenant: str | None
) -> Row[Any]:
    """Return a version that the tenant (None: anybody) may see.

    Raises:
        Refusal: there is no such version, or it is another's.
    """
    version = (await places_of(connection, policy, [number])).get(number)
    if version is None or tenant not in (None, version.tenant):
        raise Refusal(404, "There is no such version", f"{policy}@{number}")
    return version


async def chosen_policy(
    request: Request, connection: AsyncConnection, tenant: str | None
) -> tuple[Row[Any] | None, Sequence[Row[Any]]]:
    """Return the policy that the address names, by default the first, and all of the tenant's.

    Raises:
        Refusal: the tenant (None: anybody) has no such policy.
    """
    name = request.query_params.get("policy")
    known = await policies_of(connection, tenant, name)
    policy = next(iter(known), None)
    if name and (policy is None or policy.name != name):
        raise Refusal(404, "There is no such policy", name)
    return policy, known


async def versions(request: Request) -> Response:
    """Show the line of a policy, and what the controller compares now."""
    given = request.query_params.get("before", "")
    before = int(given) if given.isascii() and given.isdigit() and len(given) < 10 else None
    async with reading(request) as connection:
        policy, known = await chosen_policy(request, connection, viewer(request).tenant)
        standing = None if policy is None else await gated(connection, policy.name)
        if policy is None or standing is None:
            return page(request, "versions.html", policy=None, policies=known)
        line = await line_of(connection, policy.name, before, MOST)
        numbers = [version.version for version in line]
        # No episode of a version began before the version was made, but for the base model's.
        since = None if 0 in numbers else min((row.created_at for row in line), default=None)
        live, held_out = await rewards_of(connection, policy.name, numbers, since)
        events = await newest_events(connection, policy.name, numbers)
        compared = []
        for why, new, old in (
            ("the canary against what serves", standing.canary, standing.serving),
            ("what serves against its control", standing.serving, standing.control),
        ):
            if new is not None and old is not None and new.version.version:
                pair = [new.version.version, old.version.version]
                since = max(new.since, old.since)
                rewards, _ = await rewards_of(connection, policy.name, pair, since)
                compared.append((why, since, {number: rewards.get(number) for number in pair}))
    return page(
        request,
        "versions.html",
        policy=policy,
        policies=known,
        line=line,
        live=live,
        held_out=held_out,
        events=events,
        standing=standing,
        compared=compared,
        waits={one.version: events[one.version] for one in line if one.awaits_approval_at},
        older=numbers[MOST - 1] if len(numbers) >= MOST and numbers[MOST - 1] else None,
        words_of=words_of,
    )


async def version(request: Request) -> Response:
    """Show one version: its figures, where it comes from, and how it got its state."""
    policy, number = request.path_params["policy"], request.path_params["number"]
    async with reading(request) as connection:
        own = await own_version(connection, policy, number, viewer(request).tenant)
        since = own.created_at if number else None
        live, held_out = await rewards_of(connection, policy, [number], since)
        events = await list_events(connection, policy, number, most=MOST_EVENTS)
    return page(
        request,
        "version.html",
        version=own,
        live=live.get(number),
        held_out=held_out.get(number),
        events=events,
        is_waiting=own.awaits_approval_at is not None,
        words=words_of(own),
        actions=actions_of(own),
    )


async def confirm(request: Request) -> Response:
    """Show what a change would come to, and do it once that is confirmed.

    Raises:
        Refusal: it cannot be done, or the viewer's key is not for that.
    """
    require(request, "train")
    is_posted = request.method == "POST"
    given: Mapping[str, str] = await form(request) if is_posted else request.query_params
    reason = given.get("reason", "").strip()[:500]
    change = Change(
        action=request.path_params["action"],
        policy=request.path_params["policy"],
        number=request.path_params["number"],
        # The name of a key, or nobody's, at the end of what the events say for good.
        reason=f"{reason or 'by hand'} (by {viewer(request).name}, in the console)",
    )
    # What only shows what would come of it waits for others that do, and holds up nothing else.
    tried_alone = nullcontext() if is_posted else console_of(request).previewing
    try:
        async with tried_alone, writing(request) as connection:
            tried = await carry_out(connection, change, viewer(request).tenant)
            is_seen = is_posted and given.get("saw") == tried.digest
            if not is_seen:
                await connection.rollback()
    except StoreError as error:
        unknown = isinstance(error, UnknownPolicy | UnknownNames)
        status = 404 if unknown else 409
        raise Refusal(status, "This cannot be done", str(error)) from error
    if is_seen:
        to = console_of(request).url("version", policy=change.policy, number=change.number)
        return RedirectResponse(to, 303)
    return page(
        request,
        "confirm.html",
        409 if is_posted else 200,
        change=tried,
        reason=reason,
        is_stale=is_posted and "saw" in given,
    )


ROUTES: Final = [
    Route("/versions", versions, name="versions"),
    Route("/versions/{policy:path}/{number:int}", version, name="version"),
    Route(
        "/versions/{policy:path}/{number:int}/{action}",
        confirm,
        name="confirm",
        methods=["GET", "POST"],
    ),
]
