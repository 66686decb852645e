"""Take recorded calls through their steps, and answer and record each whatever fails.

The steps are `asking`, `routing`, `answering` and `recording`; each makes a value, and the later
ones start from it. The order matters. The request leaves at once, chunks are passed on as they
come, the record is made durable, and only then does the reply's end leave. Whatever happens (the
client leaves, the reply breaks off), the call ends with exactly one status and one record.
"""

from time import perf_counter
from typing import Final

import msgspec
import structlog

from proxy.calls.answering import Answer, answer_of, own_headers
from proxy.calls.asking import (
    Arrived,
    alone,
    arrive,
    unread,
    who_asks,
    with_tool_events,
)
from proxy.calls.recording import Answered, CallRecorder, Recorded, note_call
from proxy.calls.retrying import is_refused_for_ours, once_loaded, send_again
from proxy.calls.routing import (
    CallRouter,
    Routed,
    rewritten,
    send,
    unrouted,
    without_ids,
)
from proxy.error_replies import UNEXPECTED, refuse, send_internal_error
from proxy.errors import ProxyError, ReplyTorn
from proxy.forwarding import check_redirect
from proxy.http.exchange import ClientGone, Exchange
from proxy.http.wire import Headers
from proxy.identity.call_memory import CallMemory
from proxy.intake import Claim, Intake
from proxy.keys.limits import Usage
from proxy.lookup import Lookup
from proxy.metrics import ADDED_SECONDS, UNFORESEEN, WARNINGS
from proxy.policies.versions import Versions
from proxy.routing import Route
from proxy.spool.recorder import Recorder
from proxy.tenants import check_continued, responses_named
from proxy.tool_events import HEADER as TOOL_STATUS_HEADER
from proxy.upstreams.replies import Reply
from proxy.upstreams.upstreams import ModelServer, Upstreams
from store.records import CallStatus

log = structlog.get_logger()

REFUSED: Final = 400


class Shared(msgspec.Struct, frozen=True):
    """Hold the parts that all calls of a worker share.

    `max_reply` is in bytes; `eval_tasks` is how the names of tasks begin that are evaluation.
    """

    stitches: CallMemory
    router: CallRouter
    lookup: Lookup
    intake: Intake
    recorder: CallRecorder
    max_reply: int
    eval_tasks: str


class Call:
    """Take one call through the proxy.

    It holds the newest value of each step: a step that fails leaves the one before it, which is
    enough to answer and to record the call. All that can fail is done in `run`.
    """

    __slots__ = (
        "_answer",
        "_arrived",
        "_asked",
        "_claim",
        "_recorded",
        "_reply",
        "_routed",
        "_shared",
        "_usage",
    )

    def __init__(
        self, shared: Shared, arrived: Arrived, claim: Claim, usage: Usage | None = None
    ) -> None:
        """Begin a call of which no more is known than that it has arrived.

        Args:
            shared: what all calls share.
            arrived: the call.
            claim: its part of the memory budget.
            usage: what the client's key uses; None: no key is asked for.
        """
        self._shared = shared
        self._usage = usage
        self._arrived = arrived
        self._claim = claim
        self._asked = alone(arrived)
        self._routed = unrouted(arrived)
        self._reply: Reply | None = None
        self._answer: Answer | None = None
        self._recorded: Recorded | None = None

    async def run(self) -> None:
        """Forward the request, pass the reply back, and record the call."""
        try:
            self._ask()
            upstream = await self._route()
            reply = await send(upstream, self._arrived, self._routed)
            if reply.status >= REFUSED:
                reply = await self._past_refusal(upstream, reply)
            answer = self._answer = self._begin_answer(reply)
            status = await answer.receive()
            await self._durable(status)
            await answer.release()
        except ProxyError as error:
            await self._refuse(error)
        except ClientGone:
            raise
        except Exception:
            await self._fail()
        finally:
            # However the call ended, the upstream must stop and there must be a record.
            try:
                if self._reply is not None:
                    self._reply.close()
            finally:
                self._note(self._record("client_gone"))

    def _ask(self) -> None:
        """Find the call's identity, and the tool events that its headers state."""
        arrived, shared = self._arrived, self._shared
        headers = arrived.exchange.lowered()
        if arrived.failure is not None:
            self._asked = unread(arrived, headers, shared.eval_tasks)
            raise arrived.failure
        self._asked = who_asks(arrived, headers, shared.stitches, shared.eval_tasks)
        stated = headers.get(TOOL_STATUS_HEADER)
        if stated is not None:
            self._asked = with_tool_events(self._asked, stated)
        if self._asked.warnings:
            WARNINGS.inc()

    async def _route(self) -> ModelServer:
        """Choose the policy version and its upstream, and rewrite the request for both."""
        arrived, identity, shared = self._arrived, self._asked.identity, self._shared
        router = shared.router
        await router.check(arrived)
        for named in responses_named(arrived, router.owners):
            await check_continued(arrived, named, router.owners, shared.stitches, shared.lookup)
        policy = router.unpinned(arrived, identity)
        if policy is not None:
            await router.learn_pin(policy, identity.follows)
        serving = router.version_of(arrived, identity)
        self._routed = Routed(serving, arrived.request)
        upstream = router.upstream_of(arrived, serving)
        want_ids = await upstream.gives_ids(serving.served_name)
        if arrived.takes_long:
            self._routed = await router.rewritten_beside(arrived, serving, want_ids)
        else:
            self._routed = rewritten(arrived, serving, want_ids)
        return upstream

    async def _past_refusal(self, upstream: ModelServer, reply: Reply) -> Reply:
        """Send the request again where that can help, and return the last reply."""
        router, arrived = self._shared.router, self._arrived
        reply = await once_loaded(router, upstream, arrived, self._routed, reply)
        if is_refused_for_ours(self._routed, reply):
            # Before it is sent: the record of a call that fails now says what was sent last.
            self._routed = without_ids(arrived, self._routed)
            reply = await send_again(upstream, arrived, self._routed, reply)
            reply = await once_loaded(router, upstream, arrived, self._routed, reply)
        return reply

    def _begin_answer(self, reply: Reply) -> Answer:
        """Return the answer that passes the reply on; the version of the call is served."""
        arrived, shared, routed = self._arrived, self._shared, self._routed
        self._reply = reply
        shared.router.check_served(arrived, routed.serving, reply)
        check_redirect(reply, arrived.exchange.api_key)
        return answer_of(reply, arrived, routed, self._headers(), self._claim, shared.max_reply)

    async def _durable(self, status: CallStatus) -> None:
        """Record the call, and wait until the record is durable: only then may the end leave."""
        before = perf_counter()
        await self._record(status).on_disk
        ADDED_SECONDS.observe(perf_counter() - before)

    def _record(self, status: CallStatus) -> Recorded:
        """Record the call with this status, unless it has been recorded."""
        if self._recorded is None:
            answered = Answered(status, self._reply, self._answer)
            recorder = self._shared.recorder
            self._recorded = recorder.record(
                self._arrived, self._asked, self._routed, answered, self._usage
            )
        return self._recorded

    async def _refuse(self, error: ProxyError) -> None:
        """Answer an error that was foreseen."""
        await self._durable("truncated" if isinstance(error, ReplyTorn) else "upstream_error")
        exchange, errors = self._arrived.exchange, self._arrived.format.errors
        refuse(exchange, error, errors=errors, headers=self._headers())

    async def _fail(self) -> None:
        """Answer an unexpected error: status 500, or an error event if the reply has begun."""
        exchange, name = self._arrived.exchange, self._arrived.name
        errors = self._arrived.format.errors
        log.exception("call_failed", call=name)
        UNFORESEEN.inc()
        await self._durable("truncated" if exchange.started else "upstream_error")
        if exchange.started and exchange.open:
            exchange.write(errors.event(f"{UNEXPECTED} (call {name})."))
        send_internal_error(exchange, errors=errors, headers=self._headers())

    def _headers(self) -> Headers:
        return own_headers(self._arrived, self._asked, self._routed)

    def _note(self, recorded: Recorded) -> None:
        if recorded.capture is not None:
            note_call(recorded.capture, self._arrived, self._asked)


class CallHandler:
    """Answer the recorded calls of one worker."""

    def __init__(
        self,
        upstreams: Upstreams,
        versions: Versions,
        recorder: Recorder,
        lookup: Lookup,
        *,
        intake: Intake,
        max_reply: int,
        eval_tasks: str,
    ) -> None:
        """Store the parts.

        Args:
            upstreams: where calls are forwarded to.
            versions: which policy version serves an episode.
            recorder: where records go.
            lookup: questions to the database.
            intake: reads requests within their limits.
            max_reply: longest reply in one piece, in bytes.
            eval_tasks: how the names of tasks begin whose episodes are evaluation.
        """
        self.upstreams = upstreams
        self.intake = intake
        stitches = CallMemory()
        router = CallRouter(upstreams, versions, lookup, intake)
        self._shared = Shared(
            stitches,
            router,
            lookup,
            intake,
            CallRecorder(recorder, stitches, router),
            max_reply,
            eval_tasks,
        )

    async def handle(self, exchange: Exchange, route: Route, usage: Usage | None = None) -> None:
        """Answer one call and record it; `usage` is what the client's key uses.

        Raises:
            TooLarge, BadRequest, Overloaded: its body was refused, as by `Intake.read`.
        """
        with self.intake.budget.claim() as claim:
            arrived = await arrive(self.intake, exchange, route, claim)
            await Call(self._shared, arrived, claim, usage).run()
