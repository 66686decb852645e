"""Answers recorded calls: the only place where a call's bytes flow both ways.

The order that matters: the request leaves at once; chunks are passed on as they come; the
record is made durable; only then does the reply's end leave. Whatever happens (the client
leaves, the upstream tears), the call ends in exactly one status and one record.
"""

import asyncio
from time import perf_counter, time
from typing import Final
from uuid import UUID

import structlog

from proxy.call_log import note_call
from proxy.capture import Captured, Tape
from proxy.dialects.base import Gist, Transcript
from proxy.dialects.errors import error_event
from proxy.dialects.table import DIALECTS
from proxy.errors import ProxyError, ReplyTooLarge
from proxy.http.client import Torn
from proxy.http.exchange import Exchange
from proxy.http.wire import Headers, for_client, for_upstream, lowered
from proxy.identity.identify import Identity, identify
from proxy.identity.signs import offers_of
from proxy.identity.stitch import Stitches
from proxy.intake.budget import Claim
from proxy.intake.intake import Intake
from proxy.intake.reading import Read, take_request
from proxy.lookup import Lookup
from proxy.metrics import ADDED_SECONDS, FIRST_CHUNK_SECONDS, WARNINGS
from proxy.recorder import Recorder
from proxy.refusal import refuse
from proxy.routes import Route
from proxy.tool_status import HEADER as TOOL_STATUS_HEADER
from proxy.tool_status import ToolStatusError, parse_tool_status
from proxy.upstreams.members import Upstreams
from proxy.upstreams.model_server import ModelServer, Reply
from proxy.versions import Serving, Versions
from store.ids import new_name
from store.policies import pinned_version
from store.records import CallStatus, ToolEvent

log = structlog.get_logger()

EVENT_STREAM: Final = b"text/event-stream"
ERRORS: Final = 400
REFUSED_AS_MALFORMED: Final = (400, 422)
# How long a call may wait to be told its episode's version; a local answer takes 1 ms.
PIN_S: Final = 0.05
REPLY_COPIES: Final = 3
NOBODY: Final = Serving(None, None, None)


class Relay:
    """What every call needs."""

    def __init__(
        self,
        upstreams: Upstreams,
        versions: Versions,
        recorder: Recorder,
        lookup: Lookup,
        *,
        intake: Intake,
        max_reply: int,
        default_temperature: float,
    ) -> None:
        self.upstreams = upstreams
        self.versions = versions
        self.recorder = recorder
        self._lookup = lookup
        self.stitches = Stitches()
        self.intake = intake
        self.max_reply = max_reply
        self.default_temperature = default_temperature

    async def handle(self, exchange: Exchange, route: Route) -> None:
        """Answer one call and record it.

        Raises:
            TooLarge, BadRequest, Overloaded: its body is not taken in (see `Intake.read`).
        """
        arrived = perf_counter()
        with self.intake.budget.claim() as claim:
            read = await take_request(self.intake, exchange, claim)
            await Call(self, exchange, route, read, arrived, claim).run()

    async def learn_pin(self, model: str, episode: str) -> None:
        """Ask the ledger for the version of an episode that may have begun at another proxy.

        Only while a policy has several versions that can be served, and never for long.
        """
        if self.versions.knows(model, episode):
            return
        version = await self._lookup.ask(
            lambda connection: pinned_version(connection, model, episode), within_s=PIN_S
        )
        if version is not None:
            self.versions.pin(model, episode, version)


class Call:
    """One call's way through the proxy."""

    _upstream: ModelServer

    def __init__(
        self,
        relay: Relay,
        exchange: Exchange,
        route: Route,
        read: Read,
        arrived: float,
        claim: Claim,
    ) -> None:
        self._relay = relay
        self._claim = claim
        self._exchange = exchange
        self._route = route
        self._arrived = arrived
        self._started_at = time()
        self._id, self._name = new_name()
        self._lower = lowered(exchange.headers)
        self._dialect = DIALECTS[route.dialect or ""]
        asked = self._asked = self._rewritten = read.asked
        self._takes_long = read.takes_long
        self._identity: Identity = identify(
            self._lower,
            route,
            asked.fields,
            asked.body,
            self._name,
            relay.stitches,
            read.conversation,
        )
        self._tool_events, self._warnings = self._read_tool_status()
        self._serving = NOBODY
        self._reply: Reply | None = None
        self._transcript: Transcript | None = None
        self._tape = Tape(claim.add)
        self._status: CallStatus = "client_gone"
        self._first_chunk_ms: float | None = None
        self._record: Captured | None = None
        self._on_disk: asyncio.Future[bool] | None = None

    def _read_tool_status(self) -> tuple[tuple[ToolEvent, ...], tuple[str, ...]]:
        value = self._lower.get(TOOL_STATUS_HEADER)
        warnings = self._identity.warnings
        events: tuple[ToolEvent, ...] = ()
        if value is not None:
            try:
                events = parse_tool_status(value)
            except ToolStatusError as error:
                warnings = (*warnings, str(error))
        if warnings:
            WARNINGS.inc()
        return events, warnings

    async def run(self) -> None:
        """Forward, pass on, record, end."""
        try:
            await self._prepare()
            reply = self._reply = await self._send()
            if self._comes_in_events(reply):
                await self._stream(reply)
            else:
                await self._whole(reply)
        except ProxyError as error:
            await self._refuse(error)
        finally:
            # However it ended: the upstream stops, and there is a record.
            if self._reply is not None:
                self._reply.close()
            self._write_down()
            self._note()

    async def _prepare(self) -> None:
        """Choose the version and who serves it, and rewrite the request for both."""
        relay, model, follows = self._relay, self._asked.model, self._identity.follows
        if follows != self._name and model is not None:
            await relay.learn_pin(model, follows)
        self._serving = relay.versions.resolve(model, follows)
        # A version is served where its policy is.
        self._upstream = relay.upstreams.for_model(self._serving.policy or model)
        want_ids = await self._upstream.gives_ids(self._serving.served_name)
        if self._takes_long:
            await relay.intake.beside(self._rewrite, want_ids)
        else:
            self._rewrite(want_ids)

    def _rewrite(self, want_ids: bool) -> None:
        name = self._serving.served_name
        self._rewritten = self._dialect.rewrite(self._asked, name, want_ids=want_ids)

    async def _send(self) -> Reply:
        """Send the request; one refused as malformed is sent again as the client wrote it.

        The refusal is then about the client's own words, and what we added fails no call.
        """
        reply = await self._send_once()
        if reply.status in REFUSED_AS_MALFORMED and self._rewritten.injected:
            # Who refuses may close without saying so: the second try takes another connection.
            reply.discard()
            self._rewrite(want_ids=False)
            reply = await self._send_once()
        return reply

    async def _send_once(self) -> Reply:
        # Ids can only be taken out of a reply that can be read.
        headers = for_upstream(self._exchange.headers, plain=bool(self._rewritten.injected))
        target = self._rewritten.path or self._route.path
        query = self._exchange.target.partition("?")[2]
        if query:
            target = f"{target}?{query}"
        return await self._upstream.ask("POST", target, headers, self._rewritten.body)

    @staticmethod
    def _comes_in_events(reply: Reply) -> bool:
        kind = reply.header(b"content-type") or b""
        return kind.startswith(EVENT_STREAM) and not reply.header(b"content-encoding")

    async def _stream(self, reply: Reply) -> None:
        exchange, name = self._exchange, self._serving.served_name
        transcript = self._transcript = self._dialect.streamed(self._rewritten, name)
        exchange.begin(reply.status, reply.reason, self._reply_headers(reply))
        try:
            async for chunk in reply.pieces():
                if self._first_chunk_ms is None:
                    self._note_first_chunk()
                self._tape.add(chunk)
                exchange.write(transcript.feed(chunk))
                await exchange.drained()
        except Torn as error:
            if not transcript.ended:
                await self._tear(str(error))
                return
        held = transcript.finish()
        self._status = "complete" if transcript.ended else "truncated"
        await self._durable()
        exchange.end(held)

    async def _tear(self, why: str) -> None:
        """A torn stream ends torn, after the event that says so in its API.

        A clean end would turn it into a whole answer; the line that was cut says nothing.
        """
        log.warning("stream_torn", call=self._name, reason=why)
        self._status = "truncated"
        await self._durable()
        said = f"The model server's reply broke off: {why}."
        event = error_event(self._dialect.name, said, "upstream_error")
        self._exchange.write(event)
        self._exchange.tear()

    async def _whole(self, reply: Reply) -> None:
        length = reply.header(b"content-length")
        if length is not None and length.isdigit():
            # As it comes, as it leaves and as it is recorded.
            self._claim.add(REPLY_COPIES * min(int(length), self._relay.max_reply))
        try:
            body = await reply.read(self._relay.max_reply)
        except Torn as error:
            log.warning("reply_torn", call=self._name, reason=str(error))
            self._status = "truncated"
            await self._durable()
            self._exchange.abort()
            return
        if body is None:
            raise ReplyTooLarge(
                "The model server's reply, which comes in one piece, is larger than this proxy "
                "holds to record it; PAWL_MAX_REPLY_MB sets how much, and a stream has no limit"
            )
        self._tape.keep(body)
        name = self._serving.served_name
        transcript = self._transcript = self._dialect.whole(self._rewritten, name)
        transcript.feed(body)
        out = transcript.finish()
        self._status = "complete"
        await self._durable()
        self._exchange.reply(reply.status, reply.reason, self._reply_headers(reply), out)

    async def _refuse(self, error: ProxyError) -> None:
        self._status = "upstream_error"
        await self._durable()
        refuse(self._exchange, error, dialect=self._dialect.name, headers=self._own_headers())

    async def _durable(self) -> None:
        """Write the record down, and wait until it is on disk: the end may leave then."""
        before = perf_counter()
        self._write_down()
        assert self._on_disk is not None
        await self._on_disk
        ADDED_SECONDS.observe(perf_counter() - before)

    def _note_first_chunk(self) -> None:
        seconds = perf_counter() - self._arrived
        self._first_chunk_ms = seconds * 1000
        FIRST_CHUNK_SECONDS.observe(seconds)

    def _reply_headers(self, reply: Reply) -> Headers:
        return [*for_client(reply.headers), *self._own_headers()]

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
        """Make this call's record, once, and hand it to the spool."""
        if self._record is not None:
            return
        gist = Gist() if self._transcript is None else self._transcript.gist()
        offers = self._offer(gist)
        reply, deflated = self._tape.take()
        identity, serving, request = self._identity, self._serving, self._asked
        record = self._record = Captured(
            id=self._id,
            episode=identity.episode,
            method=identity.method,
            confidence=identity.confidence,
            agent=identity.agent,
            task=identity.task,
            dialect=self._dialect.name,
            policy=serving.policy,
            policy_version=serving.version,
            served_model=serving.served_name,
            wanted_ids=bool(self._rewritten.injected),
            status=self._status,
            http_status=None if self._reply is None else self._reply.status,
            streamed=self._reply is not None and self._comes_in_events(self._reply),
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
        self._on_disk = self._relay.recorder.take(record, self._name, gist.response_id)

    def _offer(self, gist: Gist) -> tuple[bytes, ...]:
        """What a later call may repeat of this one; known before its end leaves."""
        stitches, identity, request = self._relay.stitches, self._identity, self._asked
        offers = offers_of(self._dialect.name, request.fields, gist, identity.conversation)
        stitches.offer(offers, identity.episode, identity.follows)
        answered = self._reply is not None and self._reply.status < ERRORS
        if not answered or self._status != "complete":
            stitches.failed(request.body, identity.episode, UUID(bytes=self._id))
        return offers

    def _note(self) -> None:
        if self._record is not None:
            note_call(self._record, self._name, self._asked.model, len(self._warnings))
