"""One recorded call: forwards the request, passes the reply back, and records both.

The order matters. The request leaves at once, chunks are passed on as they come, the record is
made durable, and only then does the reply's end leave. Whatever happens (the client leaves, the
reply breaks off), the call ends with exactly one status and one record.
"""

import asyncio
from time import perf_counter, time
from typing import TYPE_CHECKING, Final
from uuid import UUID

import structlog

from proxy.calls.call_log import note_call
from proxy.calls.capture import Captured, Tape
from proxy.door.refusal import UNEXPECTED, UPSTREAM_SAID, apologise, refuse
from proxy.door.routes import Route
from proxy.errors import ProxyError, ReplyTorn
from proxy.formats.base import ReplySummary, Transcript
from proxy.http.client import Torn
from proxy.http.exchange import ClientGone, Exchange
from proxy.http.wire import Headers, for_client, for_upstream, lowered
from proxy.identity.fingerprints import offers_of
from proxy.identity.identify import DEFAULT_AGENT, Identity, identify
from proxy.intake.budget import Claim
from proxy.intake.reading import Read
from proxy.metrics import ADDED_SECONDS, FIRST_CHUNK_SECONDS, UNFORESEEN, WARNINGS
from proxy.policies.versions import Serving
from proxy.tools.tool_status import HEADER as TOOL_STATUS_HEADER
from proxy.tools.tool_status import ToolStatusError, parse_tool_status
from proxy.upstreams.decoded import as_came, readable
from proxy.upstreams.model_server import ModelServer, Reply
from proxy.upstreams.replies import comes_in_events, pass_rest, take_whole
from store.ids import new_name
from store.records import OWN_EPISODE, CallStatus, ToolEvent

if TYPE_CHECKING:
    from proxy.calls.handler import Relay

log = structlog.get_logger()

ERRORS: Final = 400
REFUSED_AS_MALFORMED: Final = (400, 422)
REPLY_COPIES: Final = 3
NOBODY: Final = Serving(None, None, None)


class Call:
    """One call on its way through the proxy.

    A new call has a body, an id and an episode of its own, which is enough to record it. Every
    step that can fail is taken in `run`, which answers and records the call in any case.
    """

    _upstream: ModelServer

    def __init__(
        self,
        relay: "Relay",
        exchange: Exchange,
        route: Route,
        read: Read,
        arrived: float,
        claim: Claim,
    ) -> None:
        """Prepare a call whose request was read.

        Args:
            relay: what all calls share.
            exchange: the client's request, and the way to answer it.
            route: the route that the request took.
            read: the parsed request.
            arrived: when the request arrived, by `time.perf_counter`.
            claim: the call's part of the memory budget.
        """
        self._relay = relay
        self._claim = claim
        self._exchange = exchange
        self._route = route
        self._arrived = arrived
        self._started_at = time()
        self._id, self._name = new_name()
        exchange.call = self._name
        self._format = route.speaks
        self._read = read
        self._asked = self._rewritten = read.asked
        self._identity = Identity(self._name, OWN_EPISODE, DEFAULT_AGENT, route.task)
        self._tool_events: tuple[ToolEvent, ...] = ()
        self._warnings: tuple[str, ...] = ()
        self._serving = NOBODY
        self._reply: Reply | None = None
        self._transcript: Transcript | None = None
        self._tape = Tape(claim.add)
        self._status: CallStatus = "client_gone"
        self._first_chunk_ms: float | None = None
        self._record: Captured | None = None
        self._on_disk: asyncio.Future[bool] | None = None

    def _understand(self) -> None:
        """Find the call's identity, and the tool events that its headers state."""
        if self._read.failure is not None:
            raise self._read.failure
        lower, request = lowered(self._exchange.headers), self._asked
        self._identity = identify(
            lower,
            self._route,
            request.fields,
            request.body,
            self._name,
            self._relay.stitches,
            self._read.conversation,
        )
        self._warnings = self._identity.warnings
        stated = lower.get(TOOL_STATUS_HEADER)
        if stated is not None:
            try:
                self._tool_events = parse_tool_status(stated)
            except ToolStatusError as error:
                self._warnings = (*self._warnings, str(error))
        if self._warnings:
            WARNINGS.inc()

    async def run(self) -> None:
        """Forward the request, pass the reply back, and record the call."""
        try:
            self._understand()
            await self._prepare()
            reply = self._reply = await self._send()
            if self._must_read:
                reply = self._reply = readable(reply)
            if comes_in_events(reply):
                await self._stream(reply)
            else:
                await self._whole(reply)
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
                self._write_down()
                self._note()

    async def _prepare(self) -> None:
        """Choose the policy version and its upstream, and rewrite the request for both."""
        relay, model, follows = self._relay, self._asked.model, self._identity.follows
        if follows != self._name and model is not None:
            await relay.learn_pin(model, follows)
        self._serving = relay.versions.resolve(model, follows)
        # A version is served where its policy is.
        self._upstream = relay.upstreams.for_model(self._serving.policy or model)
        want_ids = await self._upstream.gives_ids(self._serving.served_name)
        if self._read.takes_long:
            await relay.intake.beside(self._rewrite, want_ids)
        else:
            self._rewrite(want_ids)

    def _rewrite(self, want_ids: bool) -> None:
        name = self._serving.served_name
        self._rewritten = self._format.rewrite(self._asked, name, want_ids=want_ids)

    async def _send(self) -> Reply:
        """Send the request; if it is refused as malformed, send it again as the client wrote it.

        So nothing that the proxy adds can fail a call, and a refusal is about the client's request.
        """
        reply = await self._send_once()
        if reply.status in REFUSED_AS_MALFORMED and self._rewritten.injected:
            # A server may close after a refusal without announcing it: use another connection.
            reply.discard()
            self._rewrite(want_ids=False)
            reply = await self._send_once()
        return reply

    async def _send_once(self) -> Reply:
        # What a change adds to the reply can only be removed if the reply is not compressed.
        headers = for_upstream(self._exchange.headers, plain=self._must_read)
        target = self._rewritten.path or self._route.path
        query = self._exchange.target.partition("?")[2]
        if query:
            target = f"{target}?{query}"
        return await self._upstream.ask("POST", target, headers, self._rewritten.body)

    @property
    def _must_read(self) -> bool:
        """Return whether the reply must be readable, because the request was changed."""
        return self._rewritten.body is not self._asked.body

    async def _stream(self, reply: Reply) -> None:
        exchange, name = self._exchange, self._serving.served_name
        transcript = self._transcript = self._format.streamed(self._rewritten, name)
        exchange.begin(reply.status, reply.reason, self._reply_headers(reply.status, reply.headers))
        pieces = reply.pieces()
        try:
            async for chunk in pieces:
                if self._first_chunk_ms is None:
                    self._note_first_chunk()
                self._tape.add(chunk)
                exchange.write(transcript.feed(chunk))
                if transcript.at_end:
                    break
                await exchange.drained()
        except Torn as error:
            if not transcript.ended:
                await self._tear(str(error))
                return
        held = b"" if transcript.at_end else transcript.finish()
        self._status = "complete" if transcript.ended else "truncated"
        await self._durable()
        if transcript.at_end:
            # The reply's end was seen. The upstream may send more before it closes.
            if not reply.ended:
                await pass_rest(exchange, pieces, transcript, self._name)
            held = transcript.finish()
        exchange.end(held)

    async def _tear(self, why: str) -> None:
        """Break a stream off after its reply broke off, with an error event of its API.

        A clean end would make the cut reply look whole.
        """
        log.warning("stream_torn", call=self._name, reason=why)
        self._status = "truncated"
        await self._durable()
        message = f"The model server's reply broke off: {why}."
        self._exchange.write(self._format.errors.event(message, "upstream_error"))
        self._exchange.tear()

    async def _fail(self) -> None:
        """Answer an unexpected error: status 500, or an error event if the reply has begun."""
        log.exception("call_failed", call=self._name)
        UNFORESEEN.inc()
        exchange = self._exchange
        if self._record is None:
            self._status = "truncated" if exchange.started else "upstream_error"
        await self._durable()
        if exchange.started and exchange.open:
            exchange.write(self._format.errors.event(f"{UNEXPECTED} (call {self._name})."))
        apologise(exchange, errors=self._format.errors, headers=self._own_headers())

    async def _whole(self, reply: Reply) -> None:
        length = reply.header(b"content-length")
        if length is not None and length.isdigit():
            # In memory as it comes, as it leaves and as it is recorded.
            self._claim.add(REPLY_COPIES * min(int(length), self._relay.max_reply))
        body = await take_whole(reply, self._relay.max_reply, self._tape, self._name)
        follow, name = self._format.whole, self._serving.served_name
        transcript = self._transcript = follow(self._rewritten, name, status=reply.status)
        transcript.feed(body)
        out = transcript.finish()
        self._status = "complete"
        await self._durable()
        sent_headers, out = as_came(reply, body, out)
        headers = self._reply_headers(reply.status, sent_headers)
        self._exchange.reply(reply.status, reply.reason, headers, out)

    async def _refuse(self, error: ProxyError) -> None:
        self._status = "truncated" if isinstance(error, ReplyTorn) else "upstream_error"
        await self._durable()
        refuse(self._exchange, error, errors=self._format.errors, headers=self._own_headers())

    async def _durable(self) -> None:
        """Record the call, and wait until the record is durable: only then may the end leave."""
        before = perf_counter()
        self._write_down()
        assert self._on_disk is not None
        await self._on_disk
        ADDED_SECONDS.observe(perf_counter() - before)

    def _note_first_chunk(self) -> None:
        seconds = perf_counter() - self._arrived
        self._first_chunk_ms = seconds * 1000
        FIRST_CHUNK_SECONDS.observe(seconds)

    def _reply_headers(self, status: int, headers: Headers) -> Headers:
        source = [UPSTREAM_SAID] if status >= ERRORS else []
        return [*for_client(headers), *self._own_headers(), *source]

    def _own_headers(self) -> Headers:
        headers = [
            (b"x-pawl-call", self._name.encode()),
            (b"x-pawl-episode", self._identity.episode.encode()),
        ]
        serving = self._serving
        if serving.policy is not None:
            headers.append((b"x-pawl-policy", f"{serving.policy}@{serving.version}".encode()))
        if self._warnings:
            text = "; ".join(self._warnings).replace("\r", " ").replace("\n", " ")
            headers.append((b"x-pawl-warning", text.encode(errors="replace")))
        return headers

    def _write_down(self) -> None:
        """Hand this call's record to the recorder, once; if it cannot be made, count it as lost."""
        if self._on_disk is not None:
            return
        try:
            summary, offers = self._summary_and_offers()
            self._record = self._captured(offers)
            self._on_disk = self._relay.recorder.take(self._record, self._name, summary.response_id)
        except Exception:
            log.exception("record_not_made", call=self._name)
            self._on_disk = self._relay.recorder.lose(self._identity.episode)

    def _captured(self, offers: tuple[bytes, ...]) -> Captured:
        reply, deflated = self._tape.take()
        identity, serving, request = self._identity, self._serving, self._asked
        return Captured(
            id=self._id,
            episode=identity.episode,
            method=identity.method,
            confidence=identity.confidence,
            agent=identity.agent,
            task=identity.task,
            dialect=self._format.name,
            policy=serving.policy,
            policy_version=serving.version,
            served_model=serving.served_name,
            wanted_ids=bool(self._rewritten.injected),
            status=self._status,
            http_status=None if self._reply is None else self._reply.status,
            streamed=self._reply is not None and comes_in_events(self._reply),
            request=request.body,
            reply=reply,
            deflated=deflated,
            offers=offers,
            asks=identity.asks,
            retry_of=None if identity.retry_of is None else identity.retry_of.bytes,
            retry=identity.retry,
            tool_events=self._tool_events,
            default_temperature=self._relay.default_temperature,
            started_at=self._started_at,
            first_chunk_ms=self._first_chunk_ms,
            total_ms=(perf_counter() - self._arrived) * 1000,
        )

    def _summary_and_offers(self) -> tuple[ReplySummary, tuple[bytes, ...]]:
        """Return the reply's summary and the call's fingerprints, or empty ones if that fails."""
        try:
            summary = ReplySummary() if self._transcript is None else self._transcript.summary()
            return summary, self._offer(summary)
        except Exception:
            log.exception("offers_not_read", call=self._name)
            return ReplySummary(), ()

    def _offer(self, summary: ReplySummary) -> tuple[bytes, ...]:
        """Register what a later call may repeat of this one, and return its fingerprints.

        This happens before the reply's end leaves: the client's next call may follow at once.
        """
        stitches, identity, request = self._relay.stitches, self._identity, self._asked
        offers = offers_of(self._format.turns, request.fields, summary, identity.conversation)
        stitches.offer(offers, identity.episode, identity.follows)
        answered = self._reply is not None and self._reply.status < ERRORS
        if not answered or self._status != "complete":
            stitches.failed(request.body, identity.episode, UUID(bytes=self._id))
        return offers

    def _note(self) -> None:
        if self._record is not None:
            note_call(self._record, self._name, self._asked.model, len(self._warnings))
