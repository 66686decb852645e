"""A recorded call from arrival to end: the only place where bytes flow both ways.

The order that matters: the request leaves at once; chunks are passed on as they come; the
record is made durable; only then does the reply's end leave. Whatever happens (the client
leaves, the upstream tears), the call ends in exactly one status and one record.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime
from time import perf_counter

import aiohttp
import structlog
from aiohttp import web

from proxy.bodies import read_body
from proxy.dialects.base import Gist, Transcript, read_request
from proxy.dialects.table import DIALECTS
from proxy.errors import ProxyError, error_body
from proxy.identity import Identity, identify
from proxy.metrics import (
    ADDED_SECONDS,
    CALL_SECONDS,
    CALLS,
    FIRST_CHUNK_SECONDS,
    IN_FLIGHT,
    WARNINGS,
)
from proxy.recorder import Outcome, Recorder
from proxy.routes import Route
from proxy.signs import offers_of
from proxy.stitch import Stitches
from proxy.tool_status import HEADER as TOOL_STATUS_HEADER
from proxy.tool_status import ToolStatusError, parse_tool_status
from proxy.upstream import Upstream, reply_headers, request_headers
from proxy.versions import Serving, Versions
from store.ids import new_id
from store.records import CallRecord, CallStatus, ToolEvent

log = structlog.get_logger()

EVENT_STREAM = "text/event-stream"
REFUSED_AS_MALFORMED = (400, 422)


class Torn(Exception):
    """The upstream's reply broke off."""


async def _chunks(reply: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """What the upstream sends, as it comes. Only its own failures become `Torn`."""
    try:
        async for chunk in reply.content.iter_any():
            yield chunk
    except aiohttp.ClientError as error:
        raise Torn(type(error).__name__) from error


class Relay:
    """Answers recorded calls."""

    def __init__(self, upstream: Upstream, versions: Versions, recorder: Recorder) -> None:
        self._upstream = upstream
        self._versions = versions
        self._recorder = recorder
        self.stitches = Stitches()
        self._finishing: set[asyncio.Task[CallRecord]] = set()

    async def handle(self, request: web.BaseRequest, route: Route) -> web.StreamResponse:
        """Answer one call and record it."""
        with IN_FLIGHT.track_inprogress():
            arrived = perf_counter()
            body = await read_body(request)
            return await Call(self, request, route, body, arrived).run()

    async def finish(self, call: "Call", status: CallStatus) -> CallRecord:
        """Record how a call ended; runs to its end even if the client is gone by then."""
        task = asyncio.create_task(call.record(status), name="pawl-record")
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)
        return await asyncio.shield(task)

    async def drain(self) -> None:
        """Wait for the records of calls whose clients left."""
        while self._finishing:
            await asyncio.wait(set(self._finishing))

    @property
    def upstream(self) -> Upstream:
        """The model server."""
        return self._upstream

    @property
    def versions(self) -> Versions:
        """Who serves whom."""
        return self._versions

    @property
    def recorder(self) -> Recorder:
        """Where records go."""
        return self._recorder


class Call:
    """One call's way through the proxy."""

    def __init__(
        self, relay: Relay, request: web.BaseRequest, route: Route, body: bytes, arrived: float
    ) -> None:
        self._relay = relay
        self._request = request
        self._route = route
        self._arrived = arrived
        self._started_at = datetime.now(UTC)
        self.id = new_id()
        self._dialect = DIALECTS[route.dialect or ""]
        self._asked = self._rewritten = read_request(body)
        self._identity: Identity = identify(
            request.headers, route, self._asked.fields, body, self.id, relay.stitches
        )
        self._tool_events, self._warnings = self._read_tool_status()
        self._serving = Serving(None, None, None)
        self._transcript: Transcript = self._dialect.whole(self._asked, None)
        self._http_status: int | None = None
        self._first_chunk_ms: float | None = None
        self._raw: list[bytes] = []
        self._recorded: CallRecord | None = None

    def _read_tool_status(self) -> tuple[tuple[ToolEvent, ...], tuple[str, ...]]:
        value = self._request.headers.get(TOOL_STATUS_HEADER)
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

    async def run(self) -> web.StreamResponse:
        """Forward, pass on, record, end."""
        status: CallStatus = "client_gone"
        try:
            await self._prepare()
            async with await self._send() as reply:
                if reply.content_type == EVENT_STREAM and not reply.headers.get("Content-Encoding"):
                    response, status = await self._stream(reply)
                else:
                    response, status = await self._whole(reply)
            return response
        except ProxyError as error:
            status = "upstream_error"
            await self._relay.finish(self, status)
            return web.Response(
                status=error.status,
                body=error_body(error),
                content_type="application/json",
                headers=self._own_headers() | {"x-pawl-fault": error.fault},
            )
        finally:
            if self._recorded is None:
                await self._relay.finish(self, status)
            self._log()

    async def _prepare(self) -> None:
        """Choose the version and rewrite the request for it."""
        self._serving = self._relay.versions.resolve(self._asked.model, self._identity.follows)
        self._rewrite(await self._relay.upstream.gives_ids(self._serving.served_name))

    def _rewrite(self, want_ids: bool) -> None:
        name = self._serving.served_name
        self._rewritten = self._dialect.rewrite(self._asked, name, want_ids=want_ids)

    async def _send(self) -> aiohttp.ClientResponse:
        """Send the request; one refused as malformed is sent again as the client wrote it.

        The refusal is then about the client's own words, and what we added fails no call.
        """
        reply = await self._send_once()
        if reply.status in REFUSED_AS_MALFORMED and self._rewritten.injected:
            reply.release()
            self._rewrite(want_ids=False)
            reply = await self._send_once()
        return reply

    async def _send_once(self) -> aiohttp.ClientResponse:
        headers = request_headers(self._request.headers)
        if self._rewritten.injected:
            # Ids can only be taken out of a reply that can be read.
            headers["Accept-Encoding"] = "identity"
        query = self._request.raw_path.partition("?")[2]
        url = self._relay.upstream.url(self._route.path, query)
        ADDED_SECONDS.observe(perf_counter() - self._arrived)
        return await self._relay.upstream.open("POST", url, headers, self._rewritten.body)

    async def _stream(self, reply: aiohttp.ClientResponse) -> tuple[web.StreamResponse, CallStatus]:
        self._http_status = reply.status
        self._transcript = self._dialect.streamed(self._rewritten, self._serving.served_name)
        headers = reply_headers(reply.headers, keep_length=False)
        headers.extend(self._own_headers())
        response = web.StreamResponse(status=reply.status, reason=reply.reason, headers=headers)
        await response.prepare(self._request)
        try:
            async for chunk in _chunks(reply):
                self._note_first_chunk()
                out = self._transcript.feed(chunk)
                if out:
                    await response.write(out)
        except Torn as error:
            log.warning("stream_torn", call=str(self.id), reason=str(error))
            await self._tear(response)
            return response, "truncated"
        held = self._transcript.finish()
        status: CallStatus = "complete" if self._transcript.facts().whole else "truncated"
        await self._end(status)
        await response.write_eof(held)
        return response, status

    async def _tear(self, response: web.StreamResponse) -> None:
        """A torn stream ends torn: a clean end would turn it into a whole answer."""
        await self._end("truncated")
        held = self._transcript.finish()
        with suppress(ConnectionError):
            await response.write(held)
        if self._request.transport is not None:
            self._request.transport.abort()

    async def _whole(self, reply: aiohttp.ClientResponse) -> tuple[web.StreamResponse, CallStatus]:
        self._http_status = reply.status
        try:
            body = await reply.read()
        except aiohttp.ClientError as error:
            log.warning("reply_torn", call=str(self.id), reason=type(error).__name__)
            await self._end("truncated")
            if self._request.transport is not None:
                self._request.transport.abort()
            return web.Response(status=502), "truncated"
        self._note_first_chunk()
        self._raw = [body]
        self._transcript = self._dialect.whole(self._rewritten, self._serving.served_name)
        self._transcript.feed(body)
        out = self._transcript.finish()
        await self._end("complete")
        headers = reply_headers(reply.headers, keep_length=False)
        headers.extend(self._own_headers())
        response = web.Response(status=reply.status, reason=reply.reason, body=out, headers=headers)
        return response, "complete"

    async def _end(self, status: CallStatus) -> None:
        before = perf_counter()
        await self._relay.finish(self, status)
        ADDED_SECONDS.observe(perf_counter() - before)

    def _note_first_chunk(self) -> None:
        if self._first_chunk_ms is None:
            seconds = perf_counter() - self._arrived
            self._first_chunk_ms = seconds * 1000
            FIRST_CHUNK_SECONDS.observe(seconds)

    def _own_headers(self) -> dict[str, str]:
        headers = {"x-pawl-call": str(self.id), "x-pawl-episode": self._identity.episode}
        if self._serving.policy is not None:
            headers["x-pawl-policy"] = f"{self._serving.policy}@{self._serving.version}"
        if self._warnings:
            headers["x-pawl-warning"] = "; ".join(self._warnings).replace("\n", " ")
        return headers

    async def record(self, status: CallStatus) -> CallRecord:
        """Make this call's record durable; it is made once, whoever asks first."""
        if self._recorded is not None:
            return self._recorded
        outcome = Outcome(
            status=status,
            http_status=self._http_status,
            started_at=self._started_at,
            first_chunk_ms=self._first_chunk_ms,
            total_ms=(perf_counter() - self._arrived) * 1000,
            raw_reply=b"".join(self._raw) or None,
        )
        record = self._relay.recorder.make_record(
            self.id,
            self._dialect.name,
            self._identity,
            self._serving,
            self._asked,
            self._transcript.facts(),
            outcome,
            self._tool_events,
            self._identity.retry,
        )
        self._recorded = record
        self._remember(record)
        await self._relay.recorder.record_call(record)
        return record

    def _remember(self, record: CallRecord) -> None:
        """What a later call may repeat; known before this one's end leaves."""
        stitches = self._relay.stitches
        gist = Gist(response_id=record.response_id, tool_calls=record.tool_calls)
        said = self._identity.conversation
        offers = offers_of(record.dialect, self._asked.fields, gist, said)
        stitches.offer(offers, record.episode, self._identity.follows)
        if record.status != "complete" or (record.http_status or 0) >= 400:
            stitches.failed(self._asked.body, record.episode, record.id)

    def _log(self) -> None:
        """The one canonical line of a call; never a prompt, a key or a body."""
        record = self._recorded
        if record is None:
            return
        stream = str(record.stream).lower()
        version = "" if record.policy_version is None else str(record.policy_version)
        CALLS.labels(record.policy or "", version, record.status, stream).inc()
        CALL_SECONDS.labels(stream).observe(record.total_ms / 1000)
        log.info(
            "call",
            call=str(record.id),
            episode=record.episode,
            method=record.method,
            agent=record.agent,
            model=self._asked.model,
            served=record.served_model,
            status=record.status,
            http_status=record.http_status,
            stream=record.stream,
            first_chunk_ms=None
            if record.first_chunk_ms is None
            else round(record.first_chunk_ms, 1),
            total_ms=round(record.total_ms, 1),
            prompt_tokens=len(record.tokens.prompt_ids) // 4,
            sampled_tokens=len(record.tokens.sampled_ids) // 4,
            trainable=record.trainable,
            reason=record.reason,
            retry=record.retry,
            warnings=len(self._warnings),
        )
