"""Each stored call is a span at the collector, and no agent notices whether there is one."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from threading import enumerate as threads
from time import monotonic
from typing import Any, Final, NamedTuple

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from typer.testing import CliRunner

from benchmarks.stack import free_port
from pawl.cli import app
from pawl.serving.supervisor import serve
from proxy.errors import NoSpans
from proxy.ingester.removing import DeadLetter, write_dead_letters
from proxy.ingester.spans import MOST_WAITING, SCHEMA, Spans, check_environment
from proxy.metrics import SPANS
from proxy.settings import ProxySettings
from proxy.spool.segments import encode_payload
from store.tenants import scoped
from tests.integration.conftest import Proxy, StartProxy
from tests.support.records import call, captured
from tests.support.servers.fake_upstream import FakeUpstream, answers
from tests.support.waiting import eventually, until

TRACE: Final = "0af7651916cd43dd8448eb211c80319c"
CLIENT: Final = "b7ad6b7169203331"
KEY: Final = "OTEL_EXPORTER_OTLP_HEADERS"
DROPPED: Final = 'pawl_spans_total{outcome="dropped"}'
RULES: Final = "[[rule]]\nname = 'canary'\npattern = 'canary-[0-9]+'"


class Collector(NamedTuple):
    """What was received: the requests' bodies, their headers, and the spans in them."""

    bodies: list[bytes]
    headers: list[Any]
    spans: list[Span]

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        received = ExportTraceServiceRequest.FromString(body)
        for resource in received.resource_spans:
            named = {one.key: one.value.string_value for one in resource.resource.attributes}
            assert named["service.name"] == "agents"
            for scope in resource.scope_spans:
                assert scope.schema_url == SCHEMA
                self.spans.extend(scope.spans)
        self.bodies.append(body)
        self.headers.append(request.headers)
        return web.Response()

    async def seen(self, count: int) -> list[Span]:
        """Return the spans in the order of their calls, once there are so many."""

        async def look() -> list[Span]:
            return self.spans if len(self.spans) >= count else []

        return sorted(await eventually(look), key=lambda span: span.start_time_unix_nano)


@pytest.fixture
async def collector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    """An OTLP receiver, to which the variables of OpenTelemetry lead."""
    made, port = Collector([], [], []), free_port()
    app = web.Application()
    app.router.add_post("/v1/traces", made.take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv(KEY, "api-key=of-the-collector")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "agents")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    yield made
    await runner.cleanup()


def attributes(span: Span) -> dict[str, Any]:
    values = {one.key: one.value for one in span.attributes}
    return {name: getattr(value, value.WhichOneof("value")) for name, value in values.items()}


async def test_call_is_a_span_of_its_clients_trace_without_its_text(
    start_proxy: StartProxy, collector: Collector
) -> None:
    headers = {"traceparent": f"00-{TRACE}-{CLIENT}-01", "x-pawl-episode": "e", "x-pawl-task": "t"}
    asked = [{"role": "user", "content": "what nobody may read"}]
    async with start_proxy(otel=True) as proxy:
        reply = await proxy.chat("", headers, messages=asked, temperature=0.7)
        [span] = await collector.seen(1)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, CLIENT)
    assert (span.name, span.kind, span.status.code) == ("chat m", Span.SPAN_KIND_CLIENT, 0)
    assert span.end_time_unix_nano > span.start_time_unix_nano
    said = attributes(span)
    finish = said.pop("gen_ai.response.finish_reasons").values
    assert [one.string_value for one in finish] == ["stop"]
    assert said == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "m",
        "gen_ai.request.stream": False,
        "gen_ai.request.temperature": 0.7,
        "gen_ai.conversation.id": "e",
        "gen_ai.agent.name": "default",
        "gen_ai.response.model": "m",
        "gen_ai.response.id": reply.json["id"],
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 2,
        "http.response.status_code": 200,
        "pawl.call": reply.headers["x-pawl-call"],
        "pawl.status": "complete",
        "pawl.split": "train",
        "pawl.version": 0,
        "pawl.task": "t",
    }
    assert all(header["api-key"] == "of-the-collector" for header in collector.headers)
    assert not any(text in b"".join(collector.bodies) for text in (b"nobody", b"of-the-collector"))


async def test_call_of_a_dead_letter_that_is_replayed_is_a_span(
    database_url: str, collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("PAWL_SPOOL_DIR", str(tmp_path))
    monkeypatch.setenv("PAWL_OTEL", "true")
    refused = [captured("of-a-letter"), captured("unreadable", dialect="unknown")]
    write_dead_letters(
        tmp_path, [DeadLetter(one.episode, encode_payload(one), "tested") for one in refused]
    )
    for _ in range(2):
        done = await asyncio.to_thread(CliRunner().invoke, app, ["spool", "--replay"])
        assert done.exit_code == 0, done.output
    [span] = await collector.seen(1)
    assert attributes(span)["gen_ai.conversation.id"] == "of-a-letter"


async def test_calls_of_an_episode_without_a_trace_share_a_new_trace(
    start_proxy: StartProxy, upstream: FakeUpstream, collector: Collector
) -> None:
    async with start_proxy(otel=True) as proxy:
        await proxy.chat("/episode/e", stream=True)
        upstream.behave = answers({"error": {"message": "broken"}}, 500)
        await proxy.chat("/episode/e")
        await proxy.chat("/episode/f")
        streamed, failed, other = await collector.seen(3)
    assert streamed.trace_id == failed.trace_id != other.trace_id
    assert len({span.span_id for span in (streamed, failed, other)}) == 3
    assert not streamed.parent_span_id
    assert attributes(streamed)["gen_ai.response.time_to_first_chunk"] > 0
    assert (failed.status.code, attributes(failed)["error.type"]) == (2, "500")


async def test_redacted_calls_span_keeps_its_trace_and_hides_the_text(
    start_proxy: StartProxy, collector: Collector, tmp_path: Path
) -> None:
    (rules := tmp_path / "rules.toml").write_text(RULES)
    headers = {"traceparent": f"00-{TRACE}-{CLIENT}-01"}
    asked = [{"role": "user", "content": "canary-1"}]
    async with start_proxy(otel=True, redaction=rules) as proxy:
        await proxy.chat("/episode/e", headers, messages=asked)
        [span] = await collector.seen(1)
    assert span.trace_id.hex() == TRACE
    assert attributes(span)["pawl.not_trainable"] == "redacted"
    assert b"canary" not in b"".join(collector.bodies)


async def test_unreachable_collector_costs_only_spans(
    start_proxy: StartProxy, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    async with start_proxy(otel=True) as proxy:
        before = (await proxy.counters(DROPPED))[DROPPED]

        async def dropped(proxy: Proxy = proxy) -> float:
            return (await proxy.counters(DROPPED))[DROPPED] - before

        assert (await proxy.chat("/episode/e")).status == 200
        assert len(await proxy.episodes(1)) == 1
        assert await eventually(dropped) == 1
    assert collector.spans == []


async def test_spans_of_a_collector_that_hangs_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dropped = SPANS.labels("dropped")._value
    before = dropped.get()
    # The kernel takes the connection, and nobody ever answers.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
        spans = Spans()
        spans.send(call(f"e{number}") for number in range(MOST_WAITING + 100))
        # More, where a busy machine takes longer over them than the first waits for an answer.
        assert dropped.get() - before >= 100
        began = monotonic()
        await spans.close(0.2)
        assert monotonic() - began < 0.5
        # A process would have ended by now, and its thread with it.
        await until(lambda: not any(one.name.startswith("Otel") for one in threads()))


async def test_hostile_call_values_cost_no_other_span(collector: Collector) -> None:
    hostile = {
        "episode": scoped("acme", "e"),
        "finish": "\ud800" * 1000,
        "response_id": scoped("acme", "r"),
        "usage": b'{"prompt_tokens": true, "completion_tokens": 99999999999999999999}',
        "sampling": b'{"seed": 99999999999999999999, "top_k": "\\ud800"}',
    }
    spans = Spans()
    spans.send([call(), call(**hostile), call(dialect="unknown"), call()])
    await spans.close(10.0)
    said = [attributes(span) for span in await collector.seen(3)]
    assert [one.get("pawl.tenant") for one in said] == [None, "acme", None]
    assert (said[1]["gen_ai.conversation.id"], said[1]["gen_ai.response.id"]) == ("e", "r")
    assert said[1]["gen_ai.usage.output_tokens"] == 2
    assert len(said[1]["gen_ai.response.finish_reasons"].values[0].string_value) == 256


async def test_tracing_without_its_python_packages_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "proxy.ingester.spans")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(NoSpans, match=r"PAWL_OTEL .*pip install 'pawl_rl-.*\.whl\[otel\]'"):
        await serve(ProxySettings(otel=True))


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "http/protobuf only"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "secret@collector:4318", "http://collector:4318"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "a=1, Bearer secret", "NAME=VALUE"),
    ],
)
def test_unusable_trace_collector_settings_are_refused(name: str, value: str, remedy: str) -> None:
    with pytest.raises(NoSpans, match=f"{name}: .*{remedy}") as refused:
        check_environment({name: value})
    assert value not in str(refused.value)
