"""Show the versions of policies, their line as a picture, and move the traffic between them.

A change takes two requests. The first tries it in a transaction that is rolled back, and shows the
versions' states before and after. The second makes the change, unless its result would differ now.
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

from console.pages import (
    Refusal,
    console_of,
    form,
    format_number,
    page,
    reading,
    require,
    viewer_of,
    writing,
)
from pawl.operator_moves import (
    find_to_promote,
    freeze_by_hand,
    promote_unless_changed,
    roll_back_by_hand,
)
from store.errors import StateChanged, StoreError, UnknownNames, UnknownPolicy, WrongVersionState
from store.read.gates import read_gated_policy
from store.read.lineage import (
    live_and_given_versions,
    newest_events,
    policies_of,
    rewards_of,
    versions_in_line,
)
from store.records import Record
from store.version_queries import list_events
from store.version_states import lock_policies
from store.versions import PolicyEvent

# Versions on one page, and events shown of one version.
PAGE_SIZE: Final = 40
MOST_EVENTS: Final = 50


def describe_version(version: Row[Any]) -> list[str]:
    """Return a version's state in words, then marks such as `unloaded` (pure).

    `version` is a row of `store.read.lineage`.
    """
    state = version.state.replace("_", " ")
    if version.share is not None:
        state = "control" if version.state == "retired" else state
        state += f" with {format_number(100 * version.share)} % of new episodes"
    more = {
        "unloaded": version.unloaded_at,
        "ended": version.ended_at,
        "files deleted": version.files_deleted_at,
        "training held" if version.version else "policy frozen": version.frozen_at,
    }
    return [state, *(word for word, since in more.items() if since is not None)]


def actions_of(version: Row[Any]) -> list[str]:
    """Return the actions to offer for a version (pure); carrying them out checks again."""
    is_usable = version.ended_at is None and version.files_deleted_at is None
    allowed = {
        "promote": version.state in ("loaded", "canary", "retired") and is_usable,
        "rollback": version.state in ("loaded", "canary", "serving") and version.version > 0,
    }
    return [action for action, is_allowed in allowed.items() if is_allowed]


# Changes and their results


class Change(Record, frozen=True, kw_only=True):
    """An action on a version, with its reason and, once done or tried, its result.

    `moved` has each version whose state changed, with its description before and after. `waits` is
    the event, with evidence, that made the version to promote wait for a person; else None.
    """

    action: str
    policy: str
    number: int
    reason: str = "by hand"
    moved: tuple[tuple[int, list[str], list[str]], ...] = ()
    waits: PolicyEvent | None = None

    @property
    def version_name(self) -> str:
        """Return the version's name in commands, `POLICY@N`."""
        return f"{self.policy}@{self.number}"

    @property
    def digest(self) -> str:
        """Return a digest of the change's result, which a person confirms."""
        moved = [(number, now) for number, _, now in self.moved]
        seen = [self.action, self.version_name, moved, self.waits and self.waits.id]
        return sha256(msgspec.json.encode(seen)).hexdigest()[:24]


async def carry_out(connection: AsyncConnection, change: Change, tenant: str | None) -> Change:
    """Make a change in the caller's transaction, and return it with its result.

    Raises:
        StoreError: the change cannot be made; the message says why.
        Refusal: the tenant (None: anybody) has no such version, or there is no such action.
    """
    await visible_version(connection, change.policy, change.number, tenant)
    await lock_policies(connection, [change.policy])
    places = await live_and_given_versions(connection, change.policy, [change.number])
    before = {number: describe_version(version) for number, version in places.items()}
    match change.action:
        case "promote":
            start, waits = await find_to_promote(connection, change.version_name, tenant)
            if start.unloaded:
                command = f"`pawl policies promote {change.version_name}`"
                raise WrongVersionState(
                    f"{change.version_name} is on no model server: {command} loads it first"
                )
            evidence = None if waits is None else waits.evidence
            await promote_unless_changed(connection, start, change.reason, evidence)
            change = replace(change, waits=waits)
        case "rollback":
            await roll_back_by_hand(connection, change.version_name, change.reason, tenant)
        case "freeze" | "unfreeze":
            frozen = change.action == "freeze"
            await freeze_by_hand(connection, change.policy, change.reason, tenant, frozen=frozen)
        case _:
            raise Refusal(404, "There is no such action", change.action)
    places = await live_and_given_versions(connection, change.policy, before)
    after = {number: describe_version(version) for number, version in places.items()}
    moved = tuple(
        (number, before[number], now)
        for number, now in after.items()
        if number in before and now != before[number]
    )
    if not moved:
        raise StateChanged(
            f"{change.action} of {change.version_name} changes nothing: it is so already"
        )
    return replace(change, moved=moved)


# Pages


async def visible_version(
    connection: AsyncConnection, policy: str, number: int, tenant: str | None
) -> Row[Any]:
    """Return a version that the tenant (None: anybody) may see.

    Raises:
        Refusal: there is no such version, or it is another tenant's.
    """
    version = (await live_and_given_versions(connection, policy, [number])).get(number)
    if version is None or tenant not in (None, version.tenant):
        raise Refusal(404, "There is no such version", f"{policy}@{number}")
    return version


async def chosen_policy(
    request: Request, connection: AsyncConnection, tenant: str | None
) -> tuple[Row[Any] | None, Sequence[Row[Any]]]:
    """Return the policy that the address names (default: the first), and all of the tenant's.

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
    """Show the versions of a policy, and the comparisons that the controller makes now."""
    given = request.query_params.get("before", "")
    before = int(given) if given.isascii() and given.isdigit() and len(given) < 10 else None
    async with reading(request) as connection:
        policy, known = await chosen_policy(request, connection, viewer_of(request).tenant)
        standing = None if policy is None else await read_gated_policy(connection, policy.name)
        if policy is None or standing is None:
            return page(request, "versions.html", policy=None, policies=known)
        line = await versions_in_line(connection, policy.name, before, PAGE_SIZE)
        numbers = [version.version for version in line]
        # A version's episodes began after it was made, except for the base model's.
        since = None if 0 in numbers else min((row.created_at for row in line), default=None)
        live, held_out = await rewards_of(connection, policy.name, numbers, since)
        events = await newest_events(connection, policy.name, numbers)
        compared = []
        for why, new, old in (
            ("the canary against the serving version", standing.canary, standing.serving),
            ("the serving version against its control", standing.serving, standing.control),
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
        older=numbers[PAGE_SIZE - 1]
        if len(numbers) >= PAGE_SIZE and numbers[PAGE_SIZE - 1]
        else None,
        describe_version=describe_version,
    )


async def version(request: Request) -> Response:
    """Show one version: its figures, its parent, and the events that led to its state."""
    policy, number = request.path_params["policy"], request.path_params["number"]
    async with reading(request) as connection:
        own = await visible_version(connection, policy, number, viewer_of(request).tenant)
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
        words=describe_version(own),
        actions=actions_of(own),
    )


async def confirm(request: Request) -> Response:
    """Show the result that a change would have; make the change if that result is confirmed.

    Raises:
        Refusal: the change cannot be made, or the viewer's key does not allow it.
    """
    require(request, "train")
    is_posted = request.method == "POST"
    given: Mapping[str, str] = await form(request) if is_posted else request.query_params
    reason = given.get("reason", "").strip()[:500]
    change = Change(
        action=request.path_params["action"],
        policy=request.path_params["policy"],
        number=request.path_params["number"],
        # The viewer is stored for good, at the end of the events' reason.
        reason=f"{reason or 'by hand'} (by {viewer_of(request).name}, in the console)",
    )
    # Previews wait for each other, so that their locks do not hold up other work.
    tried_alone = nullcontext() if is_posted else console_of(request).previewing
    try:
        async with tried_alone, writing(request) as connection:
            tried = await carry_out(connection, change, viewer_of(request).tenant)
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
