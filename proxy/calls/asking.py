"""Take the first step of a call: who asks, for which episode and task, and what headers state.

`Arrived` is what every later step starts from. It is enough to record a call, whatever fails next.
"""

from time import perf_counter, time

import msgspec

from proxy.door.routes import Route
from proxy.formats.base import ModelRequest, WireFormat
from proxy.http.exchange import Exchange
from proxy.identity.identify import DEFAULT_AGENT, Identity, identify, split_outside
from proxy.identity.stitch import CallMemory
from proxy.intake.reading import Read
from proxy.tools.tool_status import ToolStatusError, parse_tool_status
from store.ids import new_name
from store.records import OWN_EPISODE, ToolEvent


class Arrived(msgspec.Struct, frozen=True):
    """Hold a call whose request was read.

    `id` is the bytes of a UUIDv7 and `name` the same as text. `at` is when the request arrived, by
    `time.perf_counter`; `started_at` is Unix time in seconds. `request` is as the client sent it.
    """

    id: bytes
    name: str
    at: float
    started_at: float
    exchange: Exchange
    route: Route
    format: WireFormat
    read: Read
    request: ModelRequest

    def ms(self) -> float:
        """Return the milliseconds since the request arrived."""
        return (perf_counter() - self.at) * 1000


class Asked(msgspec.Struct, frozen=True):
    """Tell whose call it is, which tools ended before it, and what the client is warned of."""

    identity: Identity
    tool_events: tuple[ToolEvent, ...] = ()
    warnings: tuple[str, ...] = ()


def arrive(exchange: Exchange, route: Route, read: Read, at: float) -> Arrived:
    """Give a call that has arrived its id, by which its client may name it from now on.

    Args:
        exchange: the client's request, and the way to answer it.
        route: the route that the request took.
        read: the parsed request.
        at: when the request arrived, by `time.perf_counter`.
    """
    identifier, name = new_name()
    exchange.call = name
    return Arrived(
        id=identifier,
        name=name,
        at=at,
        started_at=time(),
        exchange=exchange,
        route=route,
        format=route.speaks,
        read=read,
        request=read.asked,
    )


def alone(arrived: Arrived) -> Asked:
    """Return what is known of a call before its identity was found: an episode of its own."""
    return Asked(Identity(arrived.name, OWN_EPISODE, DEFAULT_AGENT, arrived.route.task))


def unread(arrived: Arrived, headers: dict[str, str], eval_tasks: str) -> Asked:
    """Return what is known of a call whose body cannot be read; arguments as for `who_asks`."""
    split = split_outside(headers, arrived.route, eval_tasks)
    return Asked(msgspec.structs.replace(alone(arrived).identity, split=split))


def who_asks(
    arrived: Arrived, headers: dict[str, str], stitches: CallMemory, eval_tasks: str
) -> Asked:
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
        arrived.request.fields,
        arrived.request.body,
        arrived.name,
        stitches,
        arrived.read.conversation,
        eval_tasks,
    )
    return Asked(identity, (), identity.warnings)


def with_tool_events(asked: Asked, stated: str) -> Asked:
    """Add the tool events that a header states, or a warning if it cannot be read."""
    try:
        return Asked(asked.identity, parse_tool_status(stated), asked.warnings)
    except ToolStatusError as error:
        return Asked(asked.identity, (), (*asked.warnings, str(error)))
