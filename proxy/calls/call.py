"""Route, send, answer and record calls; each call is answered and recorded, whatever fails.

`Call.run` shows the steps and their order. The request leaves at once, chunks are passed on as they
come, the record is made durable, and only then does the reply's end leave. Whatever happens (the
client leaves, the reply breaks off), the call ends with exactly one status and one record.
"""

import asyncio
from collections.abc import Coroutine
from time import perf_counter, time
from typing import Any, Final

import msgspec
import structlog

from proxy.calls.answer import FIRST_ERROR_STATUS, Answer, StreamedAnswer, WholeAnswer
from proxy.calls.recording import (
    RecordedCall,
    ReplyRead,
    count_and_log_call,
    read_reply,
    record_call,
)
from proxy.error_replies import UNEXPECTED, UPSTREAM_AT_FAULT, send_error, send_internal_error
from proxy.errors import NotLoaded, NotServed, ProxyError, ReplyTorn
from proxy.exploring import Changes, Exploring, changes_header, explore_request, is_chosen
from proxy.feedback import RecentTargets
from proxy.formats.base import ModelRequest, WireFormat, read_request
from proxy.formats.conversation import Conversation
from proxy.http.exchange import ClientGone, Exchange
from proxy.http.wire import Headers, headers_for_upstream
from proxy.identity.call_memory import CallMemory
from proxy.identity.identify import identify, identity_without_body
from proxy.intake import LONG_BYTES, BudgetShare, Intake
from proxy.keys import Usage
from proxy.lookup import Lookup
from proxy.metrics import ADDED_SECONDS, WARNINGS
from proxy.policies.versions import ServedVersion, Versions
from proxy.routing import Route
from proxy.spool.recorder import Recorder
from proxy.tenants import (
    check_call,
    check_continued,
    check_headers,
    check_query,
    responses_named,
)
from proxy.tool_events import STATUS_HEADER as TOOL_STATUS_HEADER
from proxy.tool_events import ToolStatusError, parse_tool_status
from proxy.upstreams.server import Reply, check_redirect, decode_reply, is_event_stream
from proxy.upstreams.upstreams import ModelServer, SamplingDefaults, Upstreams
from store.ids import new_id_with_text
from store.questions import pinned_version
from store.records import EVAL, CallStatus, ToolEvent
from store.tenants import DEFAULT, scoped

log = structlog.get_logger()

# Wait for a version, in seconds: a controller looks twice a second, and loads it in under two.
VERSION_WAIT_S: Final = 10.0
VERSION_RETRY_S: Final = 0.25
# The status by which a model server says that it has no such model.
UNKNOWN_MODEL: Final = 404
REFUSED_AS_MALFORMED: Final = (400, 422)
# Longest wait for the database to name an episode's version; a local database answers in 1 ms.
PIN_LOOKUP_S: Final = 0.05
NO_VERSION: Final = ServedVersion(None, None, None)


class CallParts(msgspec.Struct, frozen=True):
    """Objects and settings that all calls of a worker share.

    `max_reply` is the longest reply that is stored whole, in bytes. A call that
    names no split is evaluation if its task's name begins with `eval_tasks`.
    """

    upstreams: Upstreams
    versions: Versions
    recorder: Recorder
    lookup: Lookup
    intake: Intake
    memory: CallMemory
    targets: RecentTargets
    max_reply: int
    eval_tasks: str


class RoutedRequest(msgspec.Struct, frozen=True):
    """The policy version that serves a call, and the request as the upstream gets it.

    `explored` holds the settings that exploration changed, None if there are none. `changed`: the
    upstream gets other bytes than the client sent. Its reply must then be readable without content
    coding, because fields that the proxy asked for have to be removed from it.
    """

    serving: ServedVersion
    request: ModelRequest
    explored: Changes | None = None
    changed: bool = False


async def answer_call(
    parts: CallParts, exchange: Exchange, route: Route, usage: Usage | None = None
) -> None:
    """Answer and record one call; `usage` is the use of the client's key, if keys are required.

    Raises:
        TooLarge, BadRequest, Overloaded, ClientGone: the body was not read (`Intake.read`).
    """
    with parts.intake.budget.claim() as claim:
        call = Call(parts, exchange, route, claim, usage)
        await call.read()
        await call.run()


class Call:
    """One call on its way through the proxy.

    It holds the result of each step. If a step fails, the results of earlier steps are enough to
    answer and to record the call. `id` is the bytes of a UUIDv7 and `name` the same as text. A call
    of no other episode has an episode of its own, whose stored name is `own_episode`. `arrived_at`
    (head) and `read_at` (whole body) are by `time.perf_counter`; `started_at` is Unix time in
    seconds. `held_s` is the time from `read_at` until the request could be sent.
    """

    __slots__ = (
        "_failure",
        "_recorded",
        "answer",
        "arrived_at",
        "checked_request",
        "claim",
        "conversation",
        "exchange",
        "format",
        "held_s",
        "id",
        "identity",
        "name",
        "own_episode",
        "parts",
        "read_at",
        "reading",
        "reply",
        "request",
        "route",
        "routed",
        "started_at",
        "tool_events",
        "usage",
        "warnings",
    )

    def __init__(
        self,
        parts: CallParts,
        exchange: Exchange,
        route: Route,
        claim: BudgetShare,
        usage: Usage | None,
    ) -> None:
        """Begin a call whose head has arrived; `claim` is its share of the memory budget."""
        self.parts = parts
        self.exchange = exchange
        self.route = route
        self.claim = claim
        self.usage = usage
        self.arrived_at = perf_counter()
        self.held_s = 0.0
        assert route.wire_format is not None
        self.format: WireFormat = route.wire_format
        # The conversation of a request that takes long to read; None for other requests.
        self.conversation: Conversation | None = None
        self.tool_events: tuple[ToolEvent, ...] = ()
        self.warnings: tuple[str, ...] = ()
        self.reply: Reply | None = None
        self.answer: Answer | None = None
        # Reads a long reply in a thread.
        self.reading: asyncio.Task[ReplyRead] | None = None
        self._failure: Exception | None = None
        self._recorded: RecordedCall | None = None

    async def read(self) -> None:
        """Read the request, and give the call its id, which its client may use from now on.

        If parsing the body fails unexpectedly, the error is kept, and `run` answers and records the
        call.

        Raises:
            TooLarge, BadRequest, Overloaded, ClientGone: the body was not read (`Intake.read`).
        """
        exchange, intake = self.exchange, self.parts.intake
        arrived = intake.read_arrived(exchange, self.claim)
        body, long = await intake.read(exchange, self.claim) if arrived is None else arrived
        self.read_at = perf_counter()
        try:
            if long:
                self.request, self.conversation = await intake.run_in_thread(self._parse_body, body)
            else:
                self.request = read_request(body, checked=True)
        except Exception as error:
            self.request, self._failure = ModelRequest(body=body), error
        self.id, self.name = new_id_with_text()
        exchange.call = self.name
        self.own_episode = scoped(exchange.tenant, self.name)
        self.started_at = time()
        self.identity = identity_without_body(self.own_episode, self.name, self.route)
        # The request without fields that may not pass; the record has the one that the client sent.
        self.checked_request = self.request
        self.routed = RoutedRequest(NO_VERSION, self.request)

    def _parse_body(self, body: bytes) -> tuple[ModelRequest, Conversation]:
        request = read_request(body, checked=True)
        return request, self.format.turns.read(request.fields)

    @property
    def takes_long(self) -> bool:
        """Return whether further work on the request must run in a thread."""
        return self.conversation is not None

    async def run(self) -> None:
        """Route, send, answer and record the call; if a step fails, answer and record that."""
        try:
            self._identify()
            upstream = await self._route()
            self.held_s = perf_counter() - self.read_at
            reply = await self.send(upstream)
            if reply.status >= FIRST_ERROR_STATUS:
                reply = await self._retry_refused(upstream, reply)
            answer = self._begin_answer(reply)
            status = await answer.receive(self)
            await self._make_durable(status)
            await answer.send_rest(self)
        except ProxyError as error:
            await self._refuse(error)
        except ClientGone:
            raise
        except Exception:
            await self._fail()
        finally:
            # However the call ended, the upstream must stop and there must be a record.
            try:
                if self.reply is not None:
                    self.reply.close()
            finally:
                recorded = self._record("client_gone")
                if recorded.capture is not None:
                    count_and_log_call(self, recorded.capture)

    # Identify: who calls, for which episode and task?

    def _identify(self) -> None:
        headers, eval_tasks = self.exchange.headers_by_name(), self.parts.eval_tasks
        if self._failure is not None:
            self.identity = identity_without_body(
                self.own_episode, self.name, self.route, headers, eval_tasks
            )
            raise self._failure
        self.identity = identify(
            headers,
            self.route,
            self.request,
            self.own_episode,
            self.parts.memory,
            self.conversation,
            eval_tasks,
        )
        self.warnings = self.identity.warnings
        stated = headers.get(TOOL_STATUS_HEADER)
        if stated is not None:
            try:
                self.tool_events = parse_tool_status(stated)
            except ToolStatusError as error:
                self.warnings = (*self.warnings, str(error))
        if self.warnings:
            WARNINGS.inc()

    # Route: which policy version serves the call, and which server has it?

    async def _route(self) -> ModelServer:
        """Choose version and upstream, and rewrite the request for both; return the upstream.

        Raises:
            ProxyError: the call names another tenant's objects, or no upstream serves its model.
        """
        parts, identity, model = self.parts, self.identity, self.request.model
        tenant, owners = self.exchange.tenant, parts.versions.owners
        if tenant != owners.sole:
            await self._check_names()
        if tenant != DEFAULT or owners.other_tenants:
            for response_id in responses_named(self.format, self.request):
                await check_continued(
                    tenant, self.format.name, response_id, owners, parts.memory, parts.lookup
                )
        if model is not None and identity.follows != self.own_episode:
            await self._learn_pin(model)
        return await self._fit_request()

    async def _fit_request(self) -> ModelServer:
        """Choose the version, rewrite the request for it and its upstream; return the upstream.

        Raises:
            NoUpstream: no upstream serves the model.
        """
        serving = self._choose_version()
        self.routed = RoutedRequest(serving, self.request)
        upstream = self.parts.upstreams.for_model(self._upstreams_model())
        model = serving.served_name
        want_ids = await upstream.gives_ids(model)
        if model is not None and want_ids and self.format.has_inline_system(self.checked_request):
            keeps_system = await upstream.keeps_system(model)
            self.checked_request = msgspec.structs.replace(
                self.checked_request, keep_system=keeps_system
            )
        if self.takes_long:
            self.routed = await self.parts.intake.run_in_thread(rewrite_request, self, want_ids)
        else:
            self.routed = rewrite_request(self, want_ids)
        return upstream

    async def _check_names(self) -> None:
        """Check that the call names no object hidden from its tenant; drop fields not allowed.

        Raises:
            NotServed, BadRequest: the call names a hidden object, or cannot be checked.
        """
        exchange, owners = self.exchange, self.parts.versions.owners
        tenant, headers = exchange.tenant, exchange.headers
        check_headers(owners, tenant, headers)
        check_query(owners, tenant, exchange.target)
        arguments = (owners, tenant, self.route.path, headers, self.request)
        if self.takes_long:
            self.checked_request, warning = await self.parts.intake.run_in_thread(
                check_call, *arguments
            )
        else:
            self.checked_request, warning = check_call(*arguments)
        if warning is not None:
            if not self.warnings:
                WARNINGS.inc()
            self.warnings = (*self.warnings, warning)

    async def _learn_pin(self, model: str) -> None:
        """Learn from the database the version of an episode that may have begun at another proxy.

        This is needed only for a policy with several servable versions.
        """
        versions, episode = self.parts.versions, self.identity.follows
        policy = versions.trained_policy(model, self.identity.agent, self.exchange.tenant)
        if policy is None or versions.knows_version_of(policy, episode):
            return
        version = await self.parts.lookup.ask(
            lambda driver: pinned_version(driver, policy, episode), within_s=PIN_LOOKUP_S
        )
        if version is not None:
            versions.pin(policy, episode, version)

    def _choose_version(self) -> ServedVersion:
        """Return the policy version for the call, with its rule if the episode explores."""
        versions, identity, model = self.parts.versions, self.identity, self.request.model
        episode, agent, tenant = identity.follows, identity.agent, self.exchange.tenant
        serving = versions.resolve(
            model, episode, agent, tenant, identity.split, is_unnamed=episode == self.own_episode
        )
        if not versions.is_exploring or model is None or identity.split == EVAL:
            return serving
        rule = versions.exploration(model, agent, tenant)
        if rule is None or not is_chosen(episode, rule.share):
            return serving
        self.routed = RoutedRequest(serving, self.request)
        exploring = Exploring(rule, self.sampling_defaults())
        return msgspec.structs.replace(serving, exploring=exploring)

    def sampling_defaults(self) -> SamplingDefaults:
        """Return the upstream's defaults for sampling settings that a request leaves out."""
        return self.parts.upstreams.sampling_defaults(self._upstreams_model())

    def _upstreams_model(self) -> str | None:
        """Return the model that determines the upstream: for a policy, its base model."""
        policy = self.routed.serving.policy
        return self.request.model if policy is None else self.parts.versions.base_of(policy)

    # Send.

    def send(self, upstream: ModelServer) -> Coroutine[Any, Any, Reply]:
        """Send the request to its upstream, and return the reply once its head has come.

        Raises:
            ProxyError: no reply came (see `ModelServer.ask`).
        """
        return upstream.ask("POST", *self.outgoing_request())

    def outgoing_request(self) -> tuple[str, Headers, bytes]:
        """Return the target, headers and body that the upstream gets."""
        exchange, request = self.exchange, self.routed.request
        headers = headers_for_upstream(exchange.headers, exchange.tenant, plain=self.routed.changed)
        target = request.path or self.route.path
        query = exchange.target.partition("?")[2]
        if query:
            target = f"{target}?{query}"
        return target, headers, request.body

    # Send again, where that can help.

    async def _retry_refused(self, upstream: ModelServer, refusal: Reply) -> Reply:
        """Retry a refused call if that can help, and return the last reply.

        - The server does not know the version, which the store lists as servable: it is being
          loaded (`pawl controller`), or another replica has it. The call waits, for a bounded time.
          Sending it again is safe: a server that does not know a model has not run the request.
        - The server refused a request as malformed, and the proxy had added fields to it: it is
          sent again without them.

        `proxy.upstreams.server` chooses another replica for a request that could not be sent at
        all. Nothing else is ever sent twice: a model must not answer one call twice.

        Raises:
            ProxyError: no reply came to the retry, or the version is not available.
        """
        reply = await self._retry_once_loaded(upstream, refusal)
        if reply.status in REFUSED_AS_MALFORMED and self.routed.request.injected:
            # So no added field can fail a call: a second refusal is due to the client's request.
            # `routed` changes before sending: if the call fails now, its record shows what was sent
            # last.
            self.routed = rewrite_request(self, False)
            # A server may close after a refusal without announcing it: use another connection.
            reply.discard()
            reply = await self._retry_once_loaded(upstream, await self.send(upstream))
        return reply

    async def _retry_once_loaded(self, upstream: ModelServer, reply: Reply) -> Reply:
        """Return the reply or, if its server lacks the version, the reply of a replica that has it.

        The reply of a server that lists the version is final, whatever its status. A version that
        is unloaded meanwhile is not waited for: the call gets the serving version, as if it had
        come later, unless the request names the version.

        Raises:
            NotServed: the request names a version that was unloaded meanwhile.
            NotLoaded: no replica has the version within `VERSION_WAIT_S`.
            ProxyError: the call was sent, and no reply came.
        """
        versions, serving = self.parts.versions, self.routed.serving
        if reply.status != UNKNOWN_MODEL or not serving.version or self.why_not_served():
            return reply
        reply.discard()
        name, served = serving.served_name or "", None
        clock = asyncio.get_running_loop().time
        begun = clock()
        while versions.is_servable(serving):
            served = await upstream.ask_where_served(name, "POST", *self.outgoing_request())
            if served is not None or clock() - begun >= VERSION_WAIT_S:
                break
            await asyncio.sleep(VERSION_RETRY_S)
        log.info(
            "adapter_waited_for",
            call=self.name,
            version=name,
            s=round(clock() - begun, 2),
            served=served is not None,
        )
        if served is not None:
            return served
        if versions.is_servable(serving):
            raise NotLoaded(
                f"The model server does not have {name} now, and did not get it within "
                f"{VERSION_WAIT_S:.0f} s. It is being loaded again: send the request again",
                code="version_not_loaded",
            )
        why = self.why_not_served()
        if why is not None:
            raise NotServed(why, param="model", code="model_not_found")
        upstream = await self._fit_request()
        return await self._retry_once_loaded(upstream, await self.send(upstream))

    def why_not_served(self) -> str | None:
        """Return why the version that the request names is not served.

        Return None if the call's version is servable, or the request names no version.
        """
        versions = self.parts.versions
        if versions.is_servable(self.routed.serving):
            return None
        return versions.why_not_served(self.request.model)

    # Answer: pass on all but the reply's end, make the record durable, and send the end.

    def _begin_answer(self, reply: Reply) -> Answer:
        """Return the answer that passes the reply on: as it comes if it is a stream, else whole.

        Raises:
            NotServed: the request names a version that the upstream does not have.
            Redirected: the reply would send the client's key elsewhere.
            UnreadableCoding: added fields could not be removed from the reply.
        """
        self.reply = reply
        if reply.status == UNKNOWN_MODEL and (why := self.why_not_served()) is not None:
            reply.discard()
            raise NotServed(why, param="model", code="model_not_found")
        check_redirect(reply, self.exchange.api_key)
        if self.routed.changed:
            reply = decode_reply(reply)
        headers = self._own_headers()
        if reply.status >= FIRST_ERROR_STATUS:
            headers.append(UPSTREAM_AT_FAULT)
        kind = StreamedAnswer if is_event_stream(reply) else WholeAnswer
        answer = self.answer = kind(reply, headers, self.claim)
        return answer

    async def _make_durable(self, status: CallStatus) -> None:
        """Record the call, and wait until the record is durable; only then may the reply end."""
        before = perf_counter()
        if self.answer is not None and self.answer.buffer.arrived_bytes > LONG_BYTES:
            self.reading = asyncio.create_task(self.parts.intake.run_in_thread(read_reply, self))
            await asyncio.wait([self.reading])
        await self._record(status).on_disk
        ADDED_SECONDS.observe(self.held_s + perf_counter() - before)

    def _record(self, status: CallStatus) -> RecordedCall:
        """Record the call with this status, unless it was recorded before; return the record."""
        if self._recorded is None:
            self._recorded = record_call(self, status)
        return self._recorded

    async def _refuse(self, error: ProxyError) -> None:
        """Record the call, and answer it with an error of the proxy's own."""
        await self._make_durable("truncated" if isinstance(error, ReplyTorn) else "upstream_error")
        send_error(self.exchange, error, errors=self.format.errors, headers=self._own_headers())

    async def _fail(self) -> None:
        """Record the call after an unforeseen error; answer 500, or end the reply with an error."""
        exchange, errors = self.exchange, self.format.errors
        log.exception("call_failed", call=self.name)
        await self._make_durable("truncated" if exchange.started else "upstream_error")
        if exchange.started and exchange.is_open:
            exchange.write(errors.event(f"{UNEXPECTED} (call {self.name})."))
        send_internal_error(exchange, errors=errors, headers=self._own_headers())

    def _own_headers(self) -> Headers:
        """Return the headers that the proxy adds: names, version, exploration, warnings."""
        headers = [
            (b"x-pawl-call", self.name.encode()),
            (b"x-pawl-episode", self.identity.name.encode()),
        ]
        routed, serving = self.routed, self.routed.serving
        if serving.policy is not None:
            version = "" if serving.version is None else f"@{serving.version}"
            headers.append((b"x-pawl-policy", f"{serving.policy}{version}".encode()))
        if routed.explored is not None:
            headers.append((b"x-pawl-explored", changes_header(routed.explored)))
        if self.warnings:
            text = "; ".join(self.warnings).replace("\r", " ").replace("\n", " ")
            headers.append((b"x-pawl-warning", text.encode(errors="replace")))
        return headers


def rewrite_request(call: Call, want_ids: bool) -> RoutedRequest:
    """Return the call's request for the upstream: its model's name, token ids, exploration."""
    serving, request, wire_format = call.routed.serving, call.checked_request, call.format
    if serving.exploring is not None and want_ids:
        changed = explore_request(request, wire_format, serving.exploring)
        if changed is not None:
            sent = wire_format.rewrite(changed.request, serving.served_name, want_ids=True)
            # Explore only if the proxy itself asks for token ids: a call without ids cannot be
            # trained on, and a client that asks for ids wants the settings that it chose.
            if sent.injected:
                return RoutedRequest(serving, sent, changed.changes, changed=True)
    sent = wire_format.rewrite(request, serving.served_name, want_ids=want_ids)
    return RoutedRequest(serving, sent, changed=sent.body is not request.body)
