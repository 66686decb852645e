"""Show the versions of policies, their line as a picture, and move the traffic between them.

A change is asked for twice. The first page does it in a transaction that it gives up, and shows
what became different; the second does it for good, unless something else would become different.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from hashlib import sha256
from http import HTTPStatus
from typing import Final, Literal, get_args

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from pawl.by_hand import (
    as_text,
    find_to_promote,
    freeze_by_hand,
    prepare_retraining,
    promote_as_seen,
    read_query,
    recall,
    roll_back_by_hand,
    wait_until_loaded,
    why_waits,
)
from pawl.console.pages import LIMIT_S, Refusal, console_of, form, page, reading, viewer, writing
from store.errors import StateChanged, StoreError, UnknownNames, UnknownPolicy
from store.read.browsing import begin
from store.read.gates import Gated, Standing, gated
from store.read.lineage import (
    Node,
    Place,
    PolicyName,
    Rewards,
    children_of,
    line_of,
    one_version,
    places_of,
    policies_of_tenant,
    rewards_of,
    why_decided,
)
from store.records import Record
from store.selecting import Selection
from store.version_queries import list_events
from store.version_states import lock_policies
from store.versions import PolicyVersion

TITLE: Final = "Versions"
# Versions of one page, events of one version, and differences that are told one by one.
MOST: Final = 40
MOST_EVENTS: Final = 50
MOST_TOLD: Final = 20
# A retraining frees thousands of episodes in one statement: it has as long as the pool allows.
CHANGE_S: Final = 2 * LIMIT_S

# The picture: a row for each version, and lanes beside each other where the line parts.
ROW: Final = 44
LANE: Final = 18
MOST_LANES: Final = 8

Action = Literal["promote", "rollback", "freeze", "unfreeze", "retrain"]
ACTIONS: Final[tuple[Action, ...]] = get_args(Action)


# The line as a picture (pure)


class Edge(Record, frozen=True):
    """Join a version to the one that it was trained from; `open`: that is on a later page."""

    path: str
    open: bool


def lanes_of(line: Sequence[tuple[int, int | None]]) -> list[int]:
    """Return the lane of each version of a line, given with its parent, the newest first (pure).

    A child keeps its lane down to its parent, which takes the first of its children's.
    """
    waiting: list[int | None] = []
    lanes = []
    for number, parent in line:
        own = [lane for lane, wanted in enumerate(waiting) if wanted == number]
        free = [lane for lane, wanted in enumerate(waiting) if wanted is None]
        lane = (own or free or [len(waiting)])[0]
        waiting += [None] * (lane + 1 - len(waiting))
        for other in own:
            waiting[other] = None
        waiting[lane] = parent
        lanes.append(lane)
    return lanes


def middle_of(row: int, lane: int) -> tuple[int, int]:
    """Return where a version is drawn, in pixels: x, y (pure)."""
    return LANE // 2 + LANE * min(lane, MOST_LANES - 1), ROW // 2 + ROW * row


def edges_of(line: Sequence[tuple[int, int | None]], lanes: Sequence[int]) -> list[Edge]:
    """Return the lines from versions to those that they were trained from (pure)."""
    row_of = {number: row for row, (number, _) in enumerate(line)}
    edges = []
    for row, (_, parent) in enumerate(line):
        if parent is None:
            continue
        x, y = middle_of(row, lanes[row])
        to = row_of.get(parent)
        if to is None:
            edges.append(Edge(f"M{x} {y}V{ROW * len(line)}", True))
            continue
        end, bottom = middle_of(to, lanes[to])
        bend = max(bottom - ROW, y)
        curve = f"C{x} {bottom - 12} {end} {bend + 12} {end} {bottom}"
        edges.append(Edge(f"M{x} {y}V{bend}{curve}", False))
    return edges


def words_of(version: PolicyVersion) -> list[str]:
    """Return a version's state in words, with what else holds of it (pure)."""
    more = {
        "control": version.state == "retired" and version.share is not None,
        "unloaded": version.unloaded,
        "ended": version.ended,
        "files deleted": version.files_deleted,
    }
    return [version.state.replace("_", " "), *(word for word, holds in more.items() if holds)]


def shape_of(version: PolicyVersion) -> str:
    """Return the name of the shape that a version's state has in the picture (pure)."""
    is_control = version.state == "retired" and version.share is not None
    return "control" if is_control else version.state


def actions_of(version: PolicyVersion) -> list[Action]:
    """Return what a person may do with a version (pure): the functions behind refuse the rest."""
    there = not (version.ended or version.files_deleted)
    may: dict[Action, bool] = {
        "promote": version.state in ("loaded", "canary", "retired") and there,
        "rollback": version.state in ("loaded", "canary", "serving") and version.version > 0,
        "retrain": version.state in ("loaded", "canary", "serving", "retired") and there,
    }
    return [action for action, holds in may.items() if holds]


# What a change comes to


class Order(Record, frozen=True, kw_only=True):
    """Say what is to be done with a version, and why; `without` are queries of a retraining."""

    action: Action
    policy: str
    number: int
    without: tuple[str, ...] = ()
    reason: str = "by hand"

    @property
    def named(self) -> str:
        """Return the version as commands name it."""
        return f"{self.policy}@{self.number}"


class Effects(Record, frozen=True, kw_only=True):
    """Say what a change makes different, one sentence each; `notes` may be others a moment later.

    `basis` is what else a person confirms: the evidence, or which update and how many episodes.
    `waits_for` is a version that the servers have to load first.
    """

    sentences: tuple[str, ...] = ()
    basis: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    waits_for: PolicyVersion | None = None

    def digest(self, order: Order) -> str:
        """Return what tells these effects of an order from all others."""
        said = [order.action, order.named, *sorted(order.without), *self.sentences, *self.basis]
        return sha256("\n".join(said).encode()).hexdigest()[:24]


def sentences_of(policy: str, before: Mapping[int, Place], after: Mapping[int, Place]) -> list[str]:
    """Return in sentences how a policy's versions stand otherwise than before (pure)."""
    said = []
    for number in sorted(before.keys() & after.keys(), reverse=True):
        then, now, name = before[number], after[number], f"{policy}@{number}"
        if now.frozen != then.frozen:
            said.append(
                f"Only people move the traffic of {policy} from now on; training goes on."
                if now.frozen
                else f"The controller decides about the versions of {policy} again."
            )
        if now.state != then.state:
            said.append(
                {
                    "serving": f"{name} serves: new episodes begin with it.",
                    "retired": f"{name} is retired: episodes that began with it keep it.",
                    "rolled_back": f"{name} is rolled back for good: no episode begins with it, "
                    "and its episodes are not trained on.",
                    "rejected": f"{name} is rejected for good: it never serves.",
                }.get(now.state, f"{name} becomes {now.state}.")
            )
        if now.share != then.share and now.state == "retired":
            said.append(
                f"{name} is the control, with {now.share:.0%} of the new episodes."
                if now.share
                else f"{name} is no longer the control."
            )
    ended = [one for one in sorted(after) if after[one].ended and not before[one].ended]
    if ended:
        said.append(
            f"Of the loaded versions these end: {', '.join(map(str, ended))}. An ended version "
            "never serves again, and nothing is trained from it."
        )
    return said


def times_of(without: Sequence[str | Selection]) -> list[str]:
    """Return the times of a retraining's queries in UTC (pure)."""
    return [
        f"{name.replace('_', ' ')}: {value.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
        for one in without
        if isinstance(one, Selection)
        for name, value in msgspec.structs.asdict(one).items()
        if isinstance(value, datetime)
    ]


async def _carry_out(connection: AsyncConnection, order: Order, tenant: str | None) -> Effects:
    """Do what an order says, and return its effects without the sentences."""
    match order.action:
        case "promote":
            version, waits = await find_to_promote(connection, order.named, tenant)
            if version.unloaded:
                await recall(connection, version, order.reason)
            evidence = None if waits is None else waits.evidence
            await promote_as_seen(connection, version, order.reason, evidence)
            return Effects(
                basis=() if waits is None else (str(waits.id),),
                waits_for=version if version.unloaded else None,
            )
        case "rollback":
            await roll_back_by_hand(connection, order.named, order.reason, tenant)
        case "freeze" | "unfreeze":
            is_frozen = order.action == "freeze"
            await freeze_by_hand(connection, order.policy, order.reason, tenant, frozen=is_frozen)
        case "retrain":
            without = [read_query(query, zoned=True) for query in order.without]
            start, retrain = await prepare_retraining(
                connection, order.policy, order.number, without, order.reason, tenant
            )
            done = await retrain(connection)
            return Effects(
                notes=(*as_text(done).splitlines(), *times_of(without)),
                basis=tuple(map(str, (done.left_out, done.learned, done.abandoned))),
                waits_for=start if start.unloaded else None,
            )
    return Effects()


async def carry_out(connection: AsyncConnection, order: Order, tenant: str | None) -> Effects:
    """Do what an order says in the caller's transaction, and return what became different.

    Raises:
        StoreError: it cannot be done; the message says why.
    """
    await begin(connection, CHANGE_S)
    await lock_policies(connection, [order.policy])
    before = await places_of(connection, order.policy, [order.number])
    effects = await _carry_out(connection, order, tenant)
    after = await places_of(connection, order.policy, before.keys())
    said = tuple(sentences_of(order.policy, before, after))
    if not said and order.action != "retrain":
        raise StateChanged(f"{order.action} of {order.named} changes nothing: it is so already")
    return msgspec.structs.replace(effects, sentences=said)


# Pages


async def _own_node(
    connection: AsyncConnection, policy: str, number: int, tenant: str | None
) -> Node:
    """Return a version that the tenant (None: anybody) may see.

    Raises:
        Refusal: there is no such version, or it is another's.
    """
    node = await one_version(connection, policy, number)
    if node is None or tenant not in (None, node.version.tenant):
        raise Refusal(HTTPStatus.NOT_FOUND, "There is no such version", f"{policy}@{number}")
    return node


async def chosen_policy(
    request: Request, connection: AsyncConnection, tenant: str | None
) -> tuple[PolicyName | None, list[PolicyName]]:
    """Return the policy that the address names, by default the first, and all of the tenant's.

    Raises:
        Refusal: the tenant (None: anybody) has no such policy.
    """
    known = await policies_of_tenant(connection, tenant)
    name = request.query_params.get("policy")
    if not name:
        return next(iter(known), None), known
    for one in known:
        if one.name == name:
            return one, known
    await _own_node(connection, name, 0, tenant)
    return PolicyName(name, None), known


def number_in(request: Request, name: str) -> int | None:
    """Return a whole number of the address, or None."""
    given = request.query_params.get(name, "")
    return int(given) if given.isascii() and given.isdigit() and len(given) < 10 else None


class Compared(Record, frozen=True):
    """Say what episodes of two versions came to since both have had new ones."""

    why: str
    since: datetime
    new: int
    old: int
    rewards: Mapping[int, Rewards]


async def compared_now(
    connection: AsyncConnection, policy: str, standing: Gated | None
) -> list[Compared]:
    """Return which versions of a policy the controller compares now, with the evidence so far."""
    pairs: list[tuple[str, Standing, Standing]] = []
    if standing is not None and standing.canary is not None:
        pairs.append(("the canary against what serves", standing.canary, standing.serving))
    if standing is not None and standing.control is not None and standing.serving.version.version:
        pairs.append(("what serves against its control", standing.serving, standing.control))
    found = []
    for why, one, other in pairs:
        since, numbers = max(one.since, other.since), (one.version.version, other.version.version)
        live, _ = await rewards_of(connection, policy, numbers, since)
        found.append(Compared(why, since, *numbers, live))
    return found


async def versions(request: Request) -> Response:
    """Show the line of a policy."""
    before = number_in(request, "before")
    async with reading(request) as connection:
        policy, known = await chosen_policy(request, connection, viewer(request).tenant)
        if policy is None:
            return page(request, "versions.html", policy=None, policies=known)
        nodes = await line_of(connection, policy.name, before, MOST)
        numbers = [node.version.version for node in nodes]
        # No episode of a version began before the version was made, but for the base model's.
        since = None if 0 in numbers else min(node.created_at for node in nodes)
        live, held_out = await rewards_of(connection, policy.name, numbers, since)
        decided = await why_decided(connection, policy.name, numbers)
        standing = await gated(connection, policy.name)
        compared = await compared_now(connection, policy.name, standing)
        waits = {node.version.version: await why_waits(connection, node.version) for node in nodes}
    line = [(node.version.version, node.parent) for node in nodes]
    lanes = lanes_of(line)
    return page(
        request,
        "versions.html",
        policy=policy,
        policies=known,
        nodes=nodes,
        live=live,
        held_out=held_out,
        decided=decided,
        standing=standing,
        compared=compared,
        waits={number: event for number, event in waits.items() if event is not None},
        points=[middle_of(row, lane) for row, lane in enumerate(lanes)],
        edges=edges_of(line, lanes),
        size=(LANE * min(max(lanes, default=0) + 1, MOST_LANES), ROW * len(nodes)),
        older=numbers[MOST - 1] if len(numbers) >= MOST and numbers[MOST - 1] else None,
        words_of=words_of,
        shape_of=shape_of,
        actions_of=actions_of,
    )


async def version(request: Request) -> Response:
    """Show one version: its figures, where it comes from, and how it got its state."""
    policy, number = request.path_params["policy"], request.path_params["number"]
    async with reading(request) as connection:
        node = await _own_node(connection, policy, number, viewer(request).tenant)
        since = node.created_at if number else None
        live, held_out = await rewards_of(connection, policy, [number], since)
        events = await list_events(connection, policy, number, most=MOST_EVENTS)
        children = await children_of(connection, policy, number)
        waits = await why_waits(connection, node.version)
    return page(
        request,
        "version.html",
        node=node,
        live=live.get(number),
        held_out=held_out.get(number),
        events=events,
        children=children,
        waits=waits,
        words=words_of(node.version),
        actions=actions_of(node.version),
    )


def _order(request: Request, given: Mapping[str, str]) -> Order:
    """Return what a confirmation page is about.

    Raises:
        Refusal: there is no such action.
    """
    action = request.path_params["action"]
    if action not in ACTIONS:
        raise Refusal(HTTPStatus.NOT_FOUND, "There is no such action", f"There are {ACTIONS}.")
    queries = (line.strip() for line in given.get("without", "").splitlines())
    # The name of a key, or nobody's, at the end of what the events say for good.
    reason = given.get("reason", "").strip()[:500] or "by hand"
    return Order(
        action=action,
        policy=request.path_params["policy"],
        number=request.path_params["number"],
        without=tuple(filter(None, queries)),
        reason=f"{reason} (by {viewer(request).name}, in the console)",
    )


async def attempt(request: Request, order: Order, saw: str | None) -> tuple[Effects, bool]:
    """Return what an order comes to, and whether it was done: that is what the viewer `saw`.

    Raises:
        StoreError: it cannot be done.
        Refusal: the viewer's key is not for that.
    """
    tenant = viewer(request).tenant
    async with writing(request, "train") as connection:
        savepoint = await connection.begin_nested()
        effects = await carry_out(connection, order, tenant)
        is_seen = saw == effects.digest(order)
        if is_seen and effects.waits_for is None:
            await savepoint.commit()
            return effects, True
        await savepoint.rollback()
        if not is_seen or effects.waits_for is None:
            return effects, False
        await recall(connection, effects.waits_for, order.reason)
    await wait_until_loaded(effects.waits_for)
    async with writing(request, "train") as connection:
        again = await carry_out(connection, order, tenant)
        if again.digest(order) != saw:
            raise StateChanged(f"while {order.named} was loaded the versions changed: look again")
    return effects, True


async def confirm(request: Request) -> Response:
    """Show what a change would come to, and do it once that is confirmed.

    Raises:
        Refusal: it cannot be done, or there is no such version.
    """
    is_posted = request.method == "POST"
    given = await form(request) if is_posted else dict(request.query_params)
    order = _order(request, given)
    async with reading(request) as connection:
        node = await _own_node(connection, order.policy, order.number, viewer(request).tenant)
        waits = await why_waits(connection, node.version)
    try:
        async with nullcontext() if is_posted else console_of(request).previewing:
            saw = given.get("saw") if is_posted else None
            effects, is_done = await attempt(request, order, saw)
    except StoreError as error:
        unknown = isinstance(error, UnknownPolicy | UnknownNames)
        status = HTTPStatus.NOT_FOUND if unknown else HTTPStatus.CONFLICT
        raise Refusal(status, "This cannot be done", str(error)) from error
    if is_done:
        to = console_of(request).url("version", policy=order.policy, number=order.number)
        return RedirectResponse(to, HTTPStatus.SEE_OTHER)
    return page(
        request,
        "confirm.html",
        HTTPStatus.CONFLICT if is_posted else HTTPStatus.OK,
        order=order,
        node=node,
        effects=effects,
        saw=effects.digest(order),
        most_told=MOST_TOLD,
        waits=waits,
        given=given,
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
