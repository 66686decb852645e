"""Take the first step of a call: read its request, and find who asks, for which episode and task.

`Arrived` is what every later step starts from. It is enough to record a call, whatever fails next.
A request whose reading takes long is read beside the event loop, its conversation included.
"""

from time import perf_counter, time

import msgspec

from proxy.formats.base import ModelRequest, WireFormat, read_request
from proxy.formats.conversation import Conversation, Turns
from proxy.http.exchange import Exchange
from proxy.identity.call_memory import CallMemory
from proxy.identity.identify import DEFAULT_AGENT, Identity, identify, split_outside
from proxy.intake import Claim, Intake
from proxy.routing import Route
from proxy.tool_events import ToolStatusError, parse_tool_status
from store.ids import new_name
from store.records import OWN_EPISODE, ToolEvent
from store.tenants import same_tenant, scoped


class Arrived(msgspec.Struct, frozen=True):
    """Hold a call whose request was read.

    `id` is the bytes of a UUIDv7, `name` the same as text, and `own` the name of an episode of its
    own, as it is kept. `at` is when the request arrived, by
    `time.perf_counter`; `started_at` is Unix time in seconds. `request` is as the client sent it.
    """

    id: bytes
    name: str
    own: str
    at: float
    started_at: float
    exchange: Exchange
    route: Route
    format: WireFormat
    request: ModelRequest
    # Of a request whose reading takes long: its conversation, which was read as well.
    conversation: Conversation | None = None
    # Why it could not be read, where that was not foreseen: the call is answered and recorded.
    failure: Exception | None = None

    @property
    def takes_long(self) -> bool:
        """Return whether further work on the request must run beside the event loop."""
        return self.conversation is not None


class CallIdentity(msgspec.Struct, frozen=True):
    """Tell whose call it is, which tools ended before it, and what the client is warned of."""

    identity: Identity
    tool_events: tuple[ToolEvent, ...] = ()
    warnings: tuple[str, ...] = ()


async def arrive(intake: Intake, exchange: Exchange, route: Route, claim: Claim) -> Arrived:
    """Read a call's request, and give the call its id, by which its client may name it from now on.

    Args:
        intake: reads bodies within their limits.
        exchange: the client's request, and the way to answer it.
        route: the route that the request took.
        claim: the call's part of the memory budget.

    Raises:
        TooLarge, BadRequest, Overloaded, ClientGone: as `Intake.read` does.
    """
    at = perf_counter()
    wire_format = route.speaks
    taken = intake.read_arrived(exchange, claim)
    body, long = await intake.read(exchange, claim) if taken is None else taken
    conversation = failure = None
    try:
        if long:
            request, conversation = await intake.beside(_read_all, body, wire_format.turns)
        else:
            request = read_request(body, checked=True)
    except Exception as error:
        request, failure = ModelRequest(body=body), error
    identifier, name = new_name()
    exchange.call = name
    return Arrived(
        id=identifier,
        name=name,
        own=scoped(exchange.tenant, name),
        at=at,
        started_at=time(),
        exchange=exchange,
        route=route,
        format=wire_format,
        request=request,
        conversation=conversation,
        failure=failure,
    )


def _read_all(body: bytes, turns: Turns) -> tuple[ModelRequest, Conversation]:
    request = read_request(body, checked=True)
    return request, turns.read(request.fields)


def alone(arrived: Arrived) -> CallIdentity:
    """Return what is known of a call before its identity was found: an episode of its own."""
    own, task = arrived.own, arrived.route.task
    kept = None if task is None else same_tenant(own, task)
    return CallIdentity(Identity(own, arrived.name, OWN_EPISODE, DEFAULT_AGENT, kept))


def unread(arrived: Arrived, headers: dict[str, str], eval_tasks: str) -> CallIdentity:
    """Return what is known of a call whose body cannot be read; arguments as for `who_asks`."""
    split = split_outside(headers, arrived.route, eval_tasks)
    return CallIdentity(msgspec.structs.replace(alone(arrived).identity, split=split))


def who_asks(
    arrived: Arrived, headers: dict[str, str], stitches: CallMemory, eval_tasks: str
) -> CallIdentity:
    """Find a call's identity.

    Args:
        arrived: the call.
        headers: the request's, by lower-case name.
        stitches: what this worker remembers of earlier calls.
        eval_tasks: how the names of tasks begin whose episodes are evaluation.
    """
    identity = identify(
        headers,
        arrived.route,
        arrived.request,
        arrived.own,
        stitches,
        arrived.conversation,
        eval_tasks,
    )
    return CallIdentity(identity, (), identity.warnings)


def with_tool_events(asked: CallIdentity, stated: str) -> CallIdentity:
    """Add the tool events that a header states, or a warning if it cannot be read."""
    try:
        return CallIdentity(asked.identity, parse_tool_status(stated), asked.warnings)
    except ToolStatusError as error:
        return CallIdentity(asked.identity, (), (*asked.warnings, str(error)))
