"""Calls through the proxy: what is captured, who they belong to, and what a client is told."""

import asyncio
import gc
import io
import json
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import pytest
from aiohttp import WSServerHandshakeError, web

from proxy.calls import call as steps
from proxy.calls import recording
from proxy.errors import SpoolInUse
from proxy.policies.owners import Owners
from proxy.policies.versions import Arms
from proxy.upstreams.server import LIST_BYTES, Upstream
from store.values.packing import unpack_ids, unpack_logprobs
from tests.integration.conftest import Proxy, StartProxy, proxy_with, running, settings_for
from tests.support.ledger.lineage import promote, trained
from tests.support.servers.fake_upstream import (
    DONE,
    FakeUpstream,
    Handler,
    answers,
    hang_up,
    streams,
)
from tests.support.servers.raw_upstream import post, raw_ask
from tests.support.waiting import eventually

CHAT: Final = "/v1/chat/completions"
RETRIED: Final = {"x-stainless-retry-count": "1"}


async def test_call_is_recorded_with_exact_token_ids_and_log_probabilities(
    proxy: Proxy, upstream: FakeUpstream
) -> None:
    seen = (await proxy.chat()).json
    assert seen["choices"][0]["token_ids"] is None
    assert seen["prompt_token_ids"] is None
    assert seen["choices"][0]["logprobs"] is None
    assert upstream.requests[0]["return_token_ids"] is True
    call = await proxy.only_call()
    assert unpack_ids(call.tokens.prompt_ids) == [1, 2, 3]
    assert unpack_ids(call.tokens.sampled_ids) == [4, 5]
    assert unpack_logprobs(call.tokens.sampled_logprobs) == [-0.5, -1.5]
    assert call.trainable
    assert json.loads(call.reply or b"") == seen


async def test_stream_is_recorded_with_token_ids_and_passed_on_without_them(proxy: Proxy) -> None:
    body = (await proxy.chat(stream=True)).body
    assert body.endswith(DONE)
    assert b'"token_ids":[' not in body
    call = await proxy.only_call()
    assert unpack_ids(call.tokens.sampled_ids) == [4, 5]
    assert json.loads(call.reply or b"")["choices"][0]["message"]["content"] == "hi"


async def test_chunks_are_passed_on_before_the_upstream_ends(
    proxy: Proxy, upstream: FakeUpstream
) -> None:
    first, go_on = b'data: {"choices":[]}\n\n', asyncio.Event()
    upstream.behave = streams(first, DONE, waits=go_on)
    asked = {"model": "m", "stream": True}
    async with proxy.session.post(proxy.url + CHAT, json=asked) as response:
        assert await response.content.readany() == first
        go_on.set()
        assert await response.content.read() == DONE


PING: Final = b'event: ping\ndata: {"type": "ping"}\n\n'
CHUNKS: Final = (
    b'data: {"id":"c","model":"m","choices":[{"index":0,"delta":{"role":"assistant"}}]}\n\n',
    b'data: {"id":"c","model":"m","choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n',
    DONE,
)
OWN_EVENTS: Final = (
    b'event: message_start\ndata: {"type":"message_start","message":{"id":"c"}}\n\n',
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
)


@pytest.mark.parametrize(
    ("path", "owner", "pieces", "pings"),
    [
        ("/v1/messages", "vllm", CHUNKS, True),
        ("/v1/messages", "vllm", CHUNKS[1:], True),
        ("/v1/messages", "other", OWN_EVENTS, True),
        ("/v1/messages", "other", (OWN_EVENTS[0][:-1], b"\n" + OWN_EVENTS[1]), False),
        (CHAT, "vllm", CHUNKS, False),
        ("/v1/responses", "vllm", CHUNKS, False),
    ],
)
async def test_only_silent_messages_streams_get_pings_and_pings_are_not_recorded(
    start_proxy: StartProxy,
    upstream: FakeUpstream,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    owner: str,
    pieces: tuple[bytes, ...],
    pings: bool,
) -> None:
    upstream.owned_by = owner
    monkeypatch.setattr("proxy.http.server.PING_S", 0.1)
    bodies = []
    async with start_proxy(head_s=0.5) as proxy:
        for silence_s in (0.0, 0.5):
            go_on = asyncio.Event()
            upstream.behave = upstream.behave_otherwise = streams(*pieces, waits=go_on)
            asyncio.get_running_loop().call_later(silence_s, go_on.set)
            messages = [{"role": "user", "content": "q"}]
            asked = {"model": "m", "messages": messages, "max_tokens": 9, "stream": True}
            bodies.append((await proxy.ask("POST", path, **asked)).body)
        at_once, late = bodies
        assert (PING in late, PING in at_once) == (pings, False)
        assert late.replace(PING, b"") == at_once
        stored = [call.reply for one in await proxy.episodes(2) for call in one.calls]
        assert stored[0] == stored[1]


async def test_plain_call_does_not_enter_optional_code(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no key, is the default tenant's, and no version is tried."""

    def entered(*_: object, **__: object) -> None:
        raise AssertionError("a plain call entered optional code")

    places: tuple[tuple[object, str], ...] = (
        (steps, "check_continued"),
        (recording, "keyed_digests"),
        *((Owners, name) for name in ("owns", "hides", "check")),
        *((Arms, name) for name in ("arm_of_new_episode", "arm_of_version", "version_of")),
    )
    for place, name in places:
        monkeypatch.setattr(place, name, entered)
    reply = await proxy.chat(headers={"x-pawl-episode": "e"})
    assert (reply.status, reply.headers["x-pawl-policy"]) == (200, "m@0")
    assert (await proxy.only_call()).policy_version == 0


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_call_leaves_no_reference_cycle(proxy: Proxy, stream: bool) -> None:
    """A worker collects garbage seldom: with cycles, a pass would hold up every stream."""
    await proxy.chat(stream=stream)
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        await proxy.chat(stream=stream)
        gc.collect()
        kinds = {type(each) for each in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert not [kind for kind in kinds if kind.__module__.startswith("proxy.")]


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/task/t1/episode/e7/agent/writer", {}),
        ("", {"x-pawl-episode": "e7", "x-pawl-agent": "writer", "x-pawl-task": "t1"}),
    ],
    ids=["url", "headers"],
)
async def test_url_and_headers_name_episode_agent_and_task_and_are_not_passed_on(
    proxy: Proxy, upstream: FakeUpstream, path: str, headers: dict[str, str]
) -> None:
    response = await proxy.chat(path, headers | {"x-my": "1"})
    assert response.headers["x-pawl-episode"] == "e7"
    assert response.headers["x-pawl-policy"] == "m@0"
    assert not any(name.lower().startswith("x-pawl") for name in upstream.headers[0])
    assert upstream.headers[0]["x-my"] == "1"
    [episode] = await proxy.episodes(1)
    assert (episode.key, episode.task, episode.calls[0].agent) == ("e7", "t1", "writer")


@pytest.mark.parametrize("name", ["\u00e9t\u00e9".encode(), b"\xff\xfe"])
async def test_episode_name_may_have_any_letters_and_invalid_utf_8_in_it_fails_no_call(
    proxy: Proxy, name: bytes
) -> None:
    body = b'{"model":"m","messages":[]}'
    port = int(proxy.settings.listen.rpartition(":")[2])
    reply = await raw_ask(port, post(CHAT, body, b"x-pawl-episode: " + name))
    assert reply.startswith(b"HTTP/1.1 200")
    if name == b"\xff\xfe":
        assert b"x-pawl-warning: x-pawl-episode" in reply
    else:
        assert b"x-pawl-episode: " + name in reply
        assert (await proxy.feedback({"value": 1, "episode": name.decode()}))[0] == 200


@pytest.mark.parametrize(
    ("header", "warning"),
    [("x-pawl-tool-status", "x-pawl-tool-status"), ("x-pawl-split", "'broken;;' is no split")],
)
async def test_malformed_header_is_a_warning_and_the_call_goes_through(
    proxy: Proxy, header: str, warning: str
) -> None:
    counted = "pawl_warnings_total"
    before = (await proxy.counters())[counted]
    response = await proxy.chat(headers={header: "broken;;"})
    assert response.status == 200
    assert warning in response.headers["x-pawl-warning"]
    assert (await proxy.counters())[counted] == before + 1
    [episode] = await proxy.episodes(1)
    assert episode.split == "train"


async def test_tool_status_that_matches_no_call_is_stored_with_the_episode(proxy: Proxy) -> None:
    headers = {"x-pawl-episode": "e", "x-pawl-tool-status": 'error;id="c1";detail="exit 2"'}
    await proxy.chat(headers=headers)
    [episode] = await proxy.episodes(1)
    assert [(e.tool_id, e.status) for e in episode.stray_tool_events] == [("c1", "error")]


async def test_malformed_json_is_refused_by_the_upstream_and_recorded(proxy: Proxy) -> None:
    reply = await proxy.ask("POST", CHAT, data=b'{"model": ')
    assert reply.status == 400
    assert "JSON" in reply.json["error"]["message"]
    call = await proxy.only_call()
    assert (call.request, call.trainable, call.reason) == (None, False, "error_reply")


async def test_admin_endpoints_of_the_model_server_are_refused_with_a_clear_error(
    proxy: Proxy, upstream: FakeUpstream
) -> None:
    reply = await proxy.ask("POST", "/v1/load_lora_adapter", data=b"{}")
    assert (reply.status, reply.headers["x-pawl-fault"]) == (404, "client")
    assert "load_lora_adapter" in reply.json["error"]["message"]
    assert upstream.other == []


@pytest.mark.parametrize("path", ["/v1/responses", "/task/t/v1/messages", "/v1/models"])
async def test_websocket_to_a_served_path_is_refused_with_426(
    proxy: Proxy, upstream: FakeUpstream, path: str
) -> None:
    """Codex goes on over HTTP at once after this status alone; it tries seven times after a 404."""
    with pytest.raises(WSServerHandshakeError) as refused:
        await proxy.session.ws_connect(proxy.url + path)
    headers = refused.value.headers
    assert headers is not None
    assert (refused.value.status, headers["Upgrade"]) == (426, "HTTP/1.1")
    assert "Upgrade" in headers.getall("Connection")
    # A server with TLS before the proxy keeps the offer to itself.
    reply = await proxy.ask("GET", path, headers={"Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="})
    assert (reply.status, reply.headers["x-pawl-fault"]) == (426, "client")
    assert "HTTP" in reply.json["error"]["message"]
    assert upstream.other == []


async def test_upgrade_other_than_websocket_or_to_an_unserved_path_gets_no_426(
    proxy: Proxy,
) -> None:
    with pytest.raises(WSServerHandshakeError) as refused:
        await proxy.session.ws_connect(proxy.url + "/v1/load_lora_adapter")
    assert refused.value.status == 404
    assert (await proxy.ask("GET", "/v1/responses")).status == 404
    offer = {"Connection": "Upgrade", "Upgrade": "h2c"}
    assert (await proxy.ask("GET", "/v1/models", headers=offer)).status == 200


async def test_requests_to_allowed_paths_other_than_calls_are_forwarded_untouched(
    proxy: Proxy, upstream: FakeUpstream
) -> None:
    reply = await proxy.ask("POST", "/v1/embeddings?x=%2F", data=b"\x00\x01")
    assert (reply.body, reply.headers["x-upstream"]) == (b"other:\x00\x01", "1")
    assert upstream.other == [("POST", "/v1/embeddings?x=%2F", b"\x00\x01")]


ANTHROPICS: Final = {"anthropic-version": "2023-06-01"}


async def test_list_of_models_is_unchanged_except_for_anthropics_clients(
    proxy: Proxy, upstream: FakeUpstream
) -> None:
    upstream.models = ["m", "m@1"]
    own = upstream.list_models().body
    assert (await proxy.ask("GET", "/v1/models?client_version=1")).body == own
    reply = await proxy.ask("GET", "/v1/models?limit=1000", ANTHROPICS)
    made = [
        {"type": "model", "display_name": one["id"], "created_at": "1970-01-01T00:00:00Z"} | one
        for one in json.loads(own)["data"]
    ]
    assert reply.json == {"data": made, "has_more": False, "first_id": "m", "last_id": "m@1"}
    head = await proxy.ask("HEAD", "/v1/models", ANTHROPICS)
    assert head.headers["content-length"] == reply.headers["content-length"]
    upstream.models = []
    reply = await proxy.ask("GET", "/v1/models", ANTHROPICS)
    assert reply.json == {"data": [], "has_more": False, "first_id": None, "last_id": None}
    upstream.list_status = 401
    assert (await proxy.ask("GET", "/v1/models", ANTHROPICS)).status == 401


@pytest.mark.parametrize(
    "body",
    [
        b'{"data":[{"type":"model","id":"a"}],"has_more":true}',
        b"odd",
        b'{"object":"list","data":[]}' + b" " * LIST_BYTES,
    ],
    ids=["of Anthropic", "odd", "too long"],
)
async def test_odd_list_of_models_reaches_anthropics_clients_unchanged(
    proxy: Proxy, upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    monkeypatch.setattr(upstream, "list_models", lambda: web.Response(body=body))
    assert (await proxy.ask("GET", "/v1/models", ANTHROPICS)).body == body


async def test_too_large_body_is_413_with_the_name_of_the_setting(
    proxy: Proxy, upstream: FakeUpstream
) -> None:
    reply = await proxy.ask("POST", CHAT, data=io.BytesIO(b"x" * (2**20 + 1)))
    assert reply.status == 413
    assert "PAWL_MAX_BODY_MB" in reply.json["error"]["message"]
    assert upstream.requests == []


async def test_upstream_that_hangs_up_is_502_and_recorded(
    proxy: Proxy, upstream: FakeUpstream
) -> None:
    upstream.behave = hang_up
    response = await proxy.chat()
    assert (response.status, response.headers["x-pawl-fault"]) == (502, "upstream")
    assert "gave no reply" in response.json["error"]["message"]
    assert (await proxy.only_call()).status == "upstream_error"


@pytest.mark.parametrize("failure", [hang_up, answers(b"", 503)], ids=["no reply", "error"])
async def test_sdk_retry_and_its_failed_attempt_are_a_single_call(
    proxy: Proxy, upstream: FakeUpstream, failure: Handler
) -> None:
    upstream.behave = failure
    failed = await proxy.chat()
    upstream.behave = None
    again = await proxy.chat(headers=RETRIED)
    assert again.headers["x-pawl-episode"] == failed.headers["x-pawl-episode"]
    other = await proxy.chat(headers=RETRIED)
    assert other.headers["x-pawl-episode"] != failed.headers["x-pawl-episode"]
    [episode, _] = await proxy.episodes(2)
    [call] = episode.calls
    assert (str(call.id), call.method) == (again.headers["x-pawl-call"], "retry")
    assert (call.status, call.trainable) == ("complete", True)


async def promote_version_1(proxy: Proxy) -> None:
    async with proxy.engine.begin() as connection:
        await trained(connection, 0)
        await promote(connection, "m", 1, reason="for the test", actor="operator")

    async def swapped() -> bool:
        return (await proxy.chat()).headers["x-pawl-policy"] == "m@1"

    await eventually(swapped)


async def test_episode_keeps_its_policy_version_after_a_newer_version_is_promoted(
    proxy: Proxy, upstream: FakeUpstream
) -> None:
    await proxy.chat("/episode/old")
    await promote_version_1(proxy)
    response = await proxy.chat("/episode/old")
    assert response.headers["x-pawl-policy"] == "m@0"
    assert upstream.requests[-1]["model"] == "m"
    response = await proxy.chat("/episode/new")
    assert upstream.requests[-1]["model"] == "m@1"
    assert response.json["model"] == "m"


@pytest.mark.usefixtures("_patient_lookups")
async def test_episode_keeps_its_version_at_another_proxy(
    proxy: Proxy, database_url: str, upstream: FakeUpstream, tmp_path: Path
) -> None:
    settings = settings_for(database_url, upstream.url, tmp_path / "other")
    async with proxy_with(settings, proxy.engine) as other:
        await proxy.chat("/episode/old")
        await proxy.episodes(1)
        await promote_version_1(proxy)
        await other.chat("/episode/unknown")
        response = await other.chat("/episode/old")
    assert response.headers["x-pawl-policy"] == "m@0"


async def test_health_readiness_and_metrics_are_served_on_the_admin_port(proxy: Proxy) -> None:
    for path in ("/healthz", "/readyz", "/metrics"):
        assert (await proxy.admin_page(path)).status == 200
    assert (await proxy.ask("GET", "/metrics")).status == 404


async def test_metric_of_added_seconds_leaves_out_the_time_that_the_upstream_takes(
    proxy: Proxy, upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed_s = 0.0

    async def asked_slowly(_: Upstream, model: str | None) -> bool:
        nonlocal passed_s
        passed_s += 1e3
        return model is not None

    async def sampled_slowly(request: web.Request) -> web.StreamResponse:
        nonlocal passed_s
        passed_s += 1e6
        return await answers({"choices": []})(request)

    monkeypatch.setattr(steps, "perf_counter", lambda: perf_counter() + passed_s)
    monkeypatch.setattr(Upstream, "gives_ids", asked_slowly)
    upstream.behave = sampled_slowly
    added = "pawl_added_seconds_sum"
    before = (await proxy.counters(added))[added]
    assert (await proxy.chat()).status == 200
    assert 1e3 <= (await proxy.counters(added))[added] - before < 1e6


async def test_second_proxy_on_the_same_spool_is_refused(proxy: Proxy, tmp_path: Path) -> None:
    other = settings_for(None, "http://127.0.0.1:1/v1", tmp_path)
    with pytest.raises(SpoolInUse, match="PAWL_SPOOL_DIR"):
        async with running(other):
            pass


async def test_numbers_of_any_size_in_a_request_are_passed_on_and_recorded(
    proxy: Proxy, upstream: FakeUpstream
) -> None:
    seed = 10**30
    headers = {"x-stainless-retry-count": "9" * 50}
    assert (await proxy.chat(seed=seed, top_k=seed, headers=headers)).status == 200
    assert upstream.requests[-1]["seed"] == seed
    call = await proxy.only_call()
    assert json.loads(call.request or b"")["seed"] == seed
    assert (call.sampling["top_k"], call.reason) == (seed, "unreadable_sampling")


async def test_configured_sampling_defaults_of_the_model_server_are_recorded(
    start_proxy: StartProxy,
) -> None:
    card: Any = {"default_temperature": 0.6, "default_sampling": {"top_p": 0.95, "top_k": 20}}
    async with start_proxy(**card) as proxy:
        assert (await proxy.chat(top_k=5)).status == 200
        call = await proxy.only_call()
    assert call.sampling == {"temperature": 0.6, "top_p": 0.95, "top_k": 5}
    assert (call.trainable, call.reason) == (True, None)


@pytest.mark.parametrize(
    ("parser", "reason"),
    [
        *((None, "constrained_sampling"), ("glm47", "constrained_sampling")),
        *(("hermes", None), ("pythonic", None)),
    ],
)
async def test_calls_with_strict_tools_are_trainable_if_the_servers_tool_parser_is_known(
    start_proxy: StartProxy, parser: str | None, reason: str | None
) -> None:
    tool = {"type": "function", "function": {"name": "f", "strict": True}}
    async with start_proxy(tool_parser=parser) as proxy:
        assert (await proxy.chat(tools=[tool])).status == 200
        call = await proxy.only_call()
    assert call.reason == reason
    # With a syntax of its own the server held the call to it; nothing else holds one.
    assert ("grammar" in call.sampling) == (parser == "hermes")


async def test_unnamed_tool_conversation_is_a_single_episode(proxy: Proxy) -> None:
    user = {"role": "user", "content": "q"}
    first = await proxy.chat(messages=[user], tools=[{"type": "function"}])
    message = first.json["choices"][0]["message"]
    result = {"role": "tool", "content": "1", "tool_call_id": message["tool_calls"][0]["id"]}
    second = await proxy.chat(messages=[user, message, result], tools=[{"type": "function"}])
    assert second.headers["x-pawl-episode"] == first.headers["x-pawl-episode"]
    assert (await proxy.feedback({"value": 1, "response": second.json["id"]}))[0] == 200
    [episode] = await proxy.episodes(2, lambda found: found[0].feedback)
    assert [f.value for f in episode.feedback] == [1.0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("behave", "answered"),
    [
        (None, "2xx"),
        (answers({"error": {"message": "m"}}, 429), "4xx"),
        (answers({"error": {"message": "m"}}, 500), "5xx"),
        (hang_up, "5xx"),
    ],
    ids=["answered", "refused by the upstream", "failed", "no reply"],
)
async def test_call_is_counted_with_the_class_of_the_status_that_its_client_got(
    proxy: Proxy, upstream: FakeUpstream, behave: Handler | None, answered: str, stream: bool
) -> None:
    async def counted() -> float:
        return sum((await proxy.counters(f'pawl_calls_total{{answered="{answered}",')).values())

    upstream.behave = behave or upstream.behave
    before = await counted()
    assert f"{(await proxy.chat(stream=stream)).status // 100}xx" == answered

    async def one_more() -> bool:
        return await counted() == before + 1

    await eventually(one_more)


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
async def test_error_reply_of_the_proxy_is_counted_under_its_exception_name(
    proxy: Proxy, upstream: FakeUpstream, path: str
) -> None:
    upstream.behave = upstream.behave_otherwise = hang_up
    sample = 'pawl_refused_total{reason="UpstreamBroke"}'
    before = (await proxy.counters())[sample]
    assert (await proxy.ask("POST", path, model="m", input="q")).status == 502
    assert (await proxy.counters())[sample] == before + 1
