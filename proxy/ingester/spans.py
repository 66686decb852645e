"""Send each stored call as an OpenTelemetry span (`PAWL_OTEL`): names and numbers, never its text.

The ingester makes a call's span once it has stored the call, so no agent waits for a collector.
Spans wait in the SDK's queue for the SDK's thread, which sends them. Spans that find the queue
full, or that the collector does not take, are dropped and counted.

The names are those of OpenTelemetry's semantic conventions for generative AI. A span continues its
client's trace; without one, the calls of an episode share a trace. Ids follow from the call, so a
call that is stored twice, after a kill, gives the same span twice.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from importlib import import_module
from threading import BoundedSemaphore, Thread
from typing import Any, Final

import msgspec
import structlog
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from proxy.errors import NoSpans
from proxy.metrics import SPANS
from store import __version__
from store.records import CallRecord, SpoolRecord
from store.tenants import DEFAULT, bare, tenant_of
from store.values.packing import ITEM_BYTES

log = structlog.get_logger()

# The conventions' last version before generative AI got a repository of its own.
SCHEMA: Final = "https://opentelemetry.io/schemas/1.41.0"
# Most spans that wait or are being sent: the SDK's own default. Each is a few KB.
MOST_WAITING: Final = 2048
BATCH: Final = 512
# Characters beyond these are cut off: servers choose ids and finish reasons freely.
LONGEST_TEXT: Final = 256
# Protobuf has no larger integers: a larger one would lose the whole batch.
INT64_END: Final = 2**63
FIRST_ERROR_STATUS: Final = 400
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND: Final = timedelta(microseconds=1)

Value = str | bool | int | float | Sequence[str]

# The operation, and the provider whose API it is, by wire format.
OPERATIONS: Final[Mapping[str, tuple[str, str]]] = {
    "chat": ("chat", "openai"),
    "completions": ("text_completion", "openai"),
    "responses": ("chat", "openai"),
    "messages": ("chat", "anthropic"),
}
SETTINGS: Final = (
    *("temperature", "top_p", "top_k", "max_tokens"),
    *("frequency_penalty", "presence_penalty", "seed"),
)
# Names of usage in chat and completions, and in responses and messages.
PROMPT_TOKENS: Final = ("prompt_tokens", "input_tokens")
SAMPLED_TOKENS: Final = ("completion_tokens", "output_tokens")


def check_environment(environment: Mapping[str, str]) -> None:
    """Check OpenTelemetry's environment variables for protocol, endpoint and headers.

    Raises:
        NoSpans: Pawl cannot use a variable. The message does not quote its value, which may hold
            credentials.
    """

    def variable(suffix: str) -> tuple[str, str]:
        names = f"OTEL_EXPORTER_OTLP_TRACES_{suffix}", f"OTEL_EXPORTER_OTLP_{suffix}"
        name = next((name for name in names if environment.get(name)), names[1])
        return name, environment.get(name, "")

    name, protocol = variable("PROTOCOL")
    if protocol not in ("", "http/protobuf"):
        raise NoSpans(f"{name}: with PAWL_OTEL, Pawl sends http/protobuf only: leave it out")
    name, endpoint = variable("ENDPOINT")
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise NoSpans(f"{name}: write the collector's URL, such as http://collector:4318")
    name, headers = variable("HEADERS")
    if any("=" not in header for header in headers.split(",") if header.strip()):
        raise NoSpans(f"{name}: write NAME=VALUE, and a comma between two of these")


class Spans:
    """Make the spans of stored calls, and hand them to the SDK's queue."""

    def __init__(self) -> None:
        """Start the SDK's thread; OpenTelemetry's environment variables name the collector."""
        # The SDK's log may quote headers and addresses with credentials.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL + 1)
        self._queue, self._ids = _Queue(_Exporter()), _Ids()
        named = Resource({SERVICE_NAME: "pawl", "service.version": __version__})
        provider = TracerProvider(
            resource=Resource.create().merge(named).merge(OTELResourceDetector().detect()),
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        provider.add_span_processor(self._queue)
        self._tracer = provider.get_tracer("pawl", __version__, schema_url=SCHEMA)

    def send(self, records: Iterable[SpoolRecord]) -> None:
        """Hand over the spans of the calls among stored records.

        This never raises: the records are stored, and must not be treated as failed.
        """
        for record in records:
            if isinstance(record, CallRecord):
                try:
                    self._send(record)
                except Exception as error:
                    SPANS.labels("dropped").inc()
                    log.error("span_not_made", call=str(record.id), error=type(error).__name__)

    def _send(self, record: CallRecord) -> None:
        self._ids.use_ids_of(record)
        attributes = _attributes(record)
        start = (record.started_at - EPOCH) // MICROSECOND * 1000
        span = self._tracer.start_span(
            f"{attributes['gen_ai.operation.name']} {attributes['gen_ai.request.model']}",
            _parent_context(record.trace),
            SpanKind.CLIENT,
            attributes,
            start_time=start,
        )
        if "error.type" in attributes:
            span.set_status(Status(StatusCode.ERROR))
        span.end(start + int(record.total_ms * 1e6))

    async def close(self, within_s: float) -> None:
        """Send waiting spans for at most `within_s` seconds, and end the thread."""
        ending = Thread(target=self._queue.shutdown, name="pawl-spans-end", daemon=True)
        ending.start()
        await asyncio.to_thread(ending.join, within_s)


class _Ids(IdGenerator):
    """Give a call's span ids that are computed from the call."""

    def __init__(self) -> None:
        self._trace = self._span = 0

    def use_ids_of(self, record: CallRecord) -> None:
        """Set the next span's ids: one trace id for each episode, one span id for each call.

        The trace id is a hash of the episode's name, unless the client sent a `traceparent`. The
        span id is the last 8 bytes of the call's id, which are random in a UUIDv7.
        """
        digest = blake2b(record.episode.encode(errors="replace"), digest_size=16).digest()
        self._trace = int.from_bytes(digest)
        self._span = int.from_bytes(record.id.bytes[8:])

    def generate_trace_id(self) -> int:
        return self._trace

    def generate_span_id(self) -> int:
        return self._span


class _Exporter(SpanExporter):
    """Send batches by OTLP; count spans as sent or dropped, and log each change between the two."""

    def __init__(self) -> None:
        session: Any = import_module("requests").Session()
        session.hooks["response"].append(self._note)
        self._sender: SpanExporter = OTLPSpanExporter(session=session)
        self._answer, self._was_taken = "", True
        self.room = BoundedSemaphore(MOST_WAITING)

    def _note(self, response: Any, **_: object) -> None:
        self._answer = f"status {response.status_code}"

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._answer = "no answer"
        try:
            result = self._sender.export(spans)
        finally:
            self.room.release(len(spans))
        is_taken = result is SpanExportResult.SUCCESS
        SPANS.labels("sent" if is_taken else "dropped").inc(len(spans))
        if is_taken and not self._was_taken:
            log.info("spans_sent_again")
        elif self._was_taken and not is_taken:
            log.warning("spans_dropped", spans=len(spans), collector=self._answer)
        self._was_taken = is_taken
        return result

    def shutdown(self) -> None:
        self._sender.shutdown()


class _Queue(BatchSpanProcessor):
    """Queue spans for the SDK's thread, and drop spans that find no room."""

    def __init__(self, exporter: _Exporter) -> None:
        self._room = exporter.room
        super().__init__(exporter, max_queue_size=MOST_WAITING, max_export_batch_size=BATCH)

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if self._room.acquire(blocking=False):
            super().on_end(span)
        else:
            SPANS.labels("dropped").inc()


def _parent_context(trace: str | None) -> Context:
    """Return the context that makes a span the child of a client's `traceparent`."""
    if trace is None:
        return Context()
    _, trace_id, span_id, flags = (int(part, 16) for part in trace.split("-"))
    client = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))
    return set_span_in_context(NonRecordingSpan(client), Context())


def _attributes(record: CallRecord) -> dict[str, Value]:
    """Return a span's attributes, without any text of the request or the reply."""
    operation, provider = OPERATIONS[record.dialect]
    settings, usage, ids = _fields(record.sampling), _fields(record.usage), record.tokens
    tenant, first_ms = tenant_of(record.episode), record.first_chunk_ms
    attributes: dict[str, Value | None] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": provider,
        "gen_ai.request.model": _text(record.policy or record.served_model) or "unknown",
        "gen_ai.request.stream": record.stream,
        **{f"gen_ai.request.{name}": _number(settings.get(name)) for name in SETTINGS},
        "gen_ai.conversation.id": _text(bare(record.episode)),
        "gen_ai.agent.name": _text(record.agent),
        "gen_ai.response.model": _text(record.served_model),
        "gen_ai.response.id": record.response_id and _text(bare(record.response_id)),
        "gen_ai.response.finish_reasons": record.finish and (_text(record.finish) or "",),
        "gen_ai.response.time_to_first_chunk": first_ms and first_ms / 1000,
        "gen_ai.usage.input_tokens": _tokens(usage, PROMPT_TOKENS, ids.prompt_ids),
        "gen_ai.usage.output_tokens": _tokens(usage, SAMPLED_TOKENS, ids.sampled_ids),
        "http.response.status_code": record.http_status,
        "error.type": _error_type(record),
        "pawl.call": str(record.id),
        "pawl.status": record.status,
        "pawl.split": record.split,
        "pawl.version": record.policy_version,
        "pawl.task": record.task and _text(bare(record.task)),
        "pawl.not_trainable": record.reason,
        "pawl.tenant": None if tenant == DEFAULT else tenant,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _error_type(record: CallRecord) -> str | None:
    """Return how a call failed, None if it did not; a client that goes away is no failure."""
    if (record.http_status or 0) >= FIRST_ERROR_STATUS:
        return str(record.http_status)
    return record.status if record.status in ("upstream_error", "truncated") else None


def _text(text: str | None) -> str | None:
    # Half of a surrogate pair would lose the whole batch.
    return text and text[:LONGEST_TEXT].encode(errors="replace").decode()


def _fields(document: bytes | None) -> dict[str, Any]:
    """Return the fields of settings or usage (JSON); {} if they cannot be decoded."""
    with suppress(msgspec.DecodeError):
        return {} if document is None else msgspec.json.decode(document, type=dict[str, Any])
    return {}


def _number(value: object) -> int | float | None:
    """Return the value if it is a number that protobuf can hold, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if isinstance(value, float) or -INT64_END <= value < INT64_END else None


def _tokens(usage: Mapping[str, object], names: Iterable[str], ids: bytes) -> int:
    """Return the number of tokens in the server's usage or, without one, of its token ids."""
    counts = (_number(usage.get(name)) for name in names)
    return next((one for one in counts if isinstance(one, int)), len(ids) // ITEM_BYTES)
