"""Every failure in the proxy leaves each request an answer and each call a record."""

import asyncio
import json
from typing import Any

import pytest

from proxy.calls import answer, recording
from proxy.calls import call as steps
from proxy.http.exchange import Exchange
from proxy.metrics import REFUSED
from tests.integration.conftest import Proxy
from tests.support.faults.counters import ledger
from tests.support.servers.fake_upstream import FakeUpstream
from tests.support.servers.raw_upstream import post, raw_ask

CHAT = "/v1/chat/completions"
BODY = b'{"model":"m","messages":[{"role":"user","content":"q"}]}'
BY_S = 15.0


class Unforeseen(Exception):
    """What nobody expects."""


def fails(*_: Any, **__: Any) -> Any:
    raise Unforeseen


async def ask(proxy: Proxy, request: bytes, *, kept: bool = True) -> tuple[bytes, bytes]:
    """Head and body of the answer; `kept`: it is the proxy who is to close, unasked."""
    if kept:
        request = request.replace(b"Connection: close\r\n", b"")
    async with asyncio.timeout(BY_S):
        head, _, body = (await raw_ask(proxy.port, request)).partition(b"\r\n\r\n")
    return head, body


# The step that fails, by the name of what it calls; `headers_by_name` is a method.
STEPS = (
    "read_request",
    "headers_by_name",
    "identify",
    "headers_for_upstream",
    "rewrite_request",
    "is_event_stream",
)


def fail(patched: pytest.MonkeyPatch, step: str) -> None:
    patched.setattr(Exchange if step == "headers_by_name" else steps, step, fails)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_proxy_failure_before_the_reply_is_500_in_the_apis_error_format_and_recorded(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, step: str, path: str
) -> None:
    before = REFUSED.labels("Unexpected")._value.get()
    fail(monkeypatch, step)
    head, body = await ask(proxy, post(path, BODY))
    assert head.startswith(b"HTTP/1.1 500 ")
    assert b"x-pawl-fault: proxy" in head
    assert b"Connection: close" in head
    reply = json.loads(body)
    assert reply["error"]["type"] == ("api_error" if path == "/v1/messages" else "server_error")
    assert ("type" in reply) is (path == "/v1/messages")
    assert REFUSED.labels("Unexpected")._value.get() == before + 1
    call = await proxy.only_call()
    assert call.status == "upstream_error"
    assert f"x-pawl-call: {call.id}".encode() in head
    assert str(call.id) in reply["error"]["message"]


@pytest.mark.parametrize("step", ["parse_tool_status", "rewrite_request", "is_event_stream"])
async def test_call_that_fails_at_a_step_is_recorded_with_the_results_of_earlier_steps(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    fail(monkeypatch, step)
    headers = {"x-pawl-episode": "named", "x-pawl-agent": "writer", "x-pawl-tool-status": "ok"}
    assert (await proxy.chat(headers=headers)).status == 500
    [episode] = await proxy.episodes(1)
    [call] = episode.calls
    assert (episode.key, call.agent) == ("named", "writer")
    assert call.http_status == (200 if step == "is_event_stream" else None)


async def test_stream_is_cut_off_after_an_error_event_if_the_proxy_fails(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer.ReplyBuffer, "add", fails)
    _, body = await ask(proxy, post(CHAT, BODY[:-1] + b',"stream":true}'))
    assert b'data: {"error":{"message":"The proxy failed' in body
    assert not body.endswith(b"0\r\n\r\n")
    call = await proxy.only_call()
    assert call.status == "truncated"


async def test_call_is_recorded_though_its_fingerprints_cannot_be_made(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "provided_fingerprints", fails)
    head, _ = await ask(proxy, post(CHAT, BODY), kept=False)
    assert head.startswith(b"HTTP/1.1 200 ")
    assert (await proxy.only_call()).status == "complete"


async def test_unrecordable_call_is_answered_and_counted_as_dropped(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = ledger()
    with monkeypatch.context() as inside:
        inside.setattr(recording, "CapturedCall", fails)
        assert (await proxy.chat(headers={"x-pawl-episode": "e"})).status == 200
    assert ledger()["pawl_records_dropped_total"] == before["pawl_records_dropped_total"] + 1
    # The next record that is durable brings the gap into the ledger.
    assert (await proxy.chat(headers={"x-pawl-episode": "e"})).status == 200
    await proxy.episodes(1, lambda found: "lost" in (found[0].quarantined_reason or ""))


@pytest.mark.parametrize("path", ["/feedback", "/v1/models"])
async def test_proxy_failure_in_feedback_or_the_list_of_models_is_500(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr("proxy.http.exchange.Exchange.headers_by_name", fails)
    monkeypatch.setattr("proxy.forwarding.headers_for_upstream", fails)
    listing = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    request = post(path, b"{}") if path == "/feedback" else listing
    head, body = await ask(proxy, request)
    assert head.startswith(b"HTTP/1.1 500 ")
    assert b"x-pawl-fault: proxy" in head
    assert json.loads(body)["error"]["type"] == "server_error"


async def test_deeply_nested_feedback_is_answered_with_an_error(proxy: Proxy) -> None:
    nested = b'{"episode":' + b"[" * 5000 + b"]" * 5000 + b"}"
    head, body = await ask(proxy, post("/feedback", nested), kept=False)
    assert head.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 500 "))
    assert json.loads(body)["error"]["message"]


async def test_feedback_that_is_not_utf_8_gets_a_400_that_names_the_invalid_byte(
    proxy: Proxy,
) -> None:
    head, body = await ask(proxy, post("/feedback", b'{"episode":"\xff","value":1}'), kept=False)
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"UTF-8" in body
    assert b"0xff" in body


async def test_list_of_models_that_is_not_utf_8_fails_no_call(
    proxy: Proxy, upstream: FakeUpstream
) -> None:
    from aiohttp import web

    body = b'{"data":[{"id":"\xff","owned_by":"vllm"}]}'
    upstream.list_models = lambda: web.Response(body=body)  # type: ignore[method-assign]
    assert (await proxy.chat(model="other")).status == 200


async def test_head_request_is_answered_like_get_without_a_body(
    proxy: Proxy, upstream: FakeUpstream
) -> None:
    for path in (b"/v1/models", b"/v1/files", b"/nothing", CHAT.encode()):
        answers = {}
        for method in (b"GET", b"HEAD"):
            request = b"%b %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % (method, path)
            answers[method] = (await raw_ask(proxy.port, request)).partition(b"\r\n\r\n")
        assert answers[b"HEAD"][2] == b""
        assert answers[b"GET"][2] != b""
        status = {method: answer[0].split(b" ")[1] for method, answer in answers.items()}
        assert status[b"HEAD"] == status[b"GET"], path
        # What an error says of a method is as long as the method.
        if status[b"GET"] == b"200":
            lengths = [
                next(x for x in answer[0].lower().split(b"\r\n") if x.startswith(b"content-length"))
                for answer in answers.values()
            ]
            assert lengths[0] == lengths[1], path
