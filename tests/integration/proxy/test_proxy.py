"""The proxy end to end: capture, transparency, identity, warnings."""

import asyncio
import json
from pathlib import Path

import pytest
from aiohttp import web
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine
from yarl import URL

from proxy.errors import SpoolInUse
from store.values.tokens import unpack_ids, unpack_logprobs
from store.version_states import ensure_base
from tests.integration.conftest import Proxy, proxy_with, running, settings_for
from tests.support.ledger.lineage import promote
from tests.support.servers.fake_upstream import FakeUpstream
from tests.support.servers.raw_upstream import post, raw_ask
from tests.support.waiting import eventually


async def test_a_call_is_captured_token_exact(proxy: Proxy, upstream: FakeUpstream) -> None:
    response = await proxy.chat()
    seen = response.json
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


async def test_a_stream_is_captured_and_passed_on(proxy: Proxy) -> None:
    response = await proxy.chat(stream=True)
    body = response.body
    assert body.endswith(b"data: [DONE]\n\n")
    assert b'"token_ids":[' not in body
    call = await proxy.only_call()
    assert unpack_ids(call.tokens.sampled_ids) == [4, 5]
    assert json.loads(call.reply or b"")["choices"][0]["message"]["content"] == "hi"


async def test_chunks_are_passed_on_before_the_upstream_ends(
    proxy: Proxy, upstream: FakeUpstream
) -> None:
    go_on = asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices":[]}\n\n')
        await go_on.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    upstream.behave = slow
    url = f"{proxy.url}/v1/chat/completions"
    async with proxy.session.post(url, json={"model": "m", "stream": True}) as response:
        first = await response.content.readany()
        assert first == b'data: {"choices":[]}\n\n'
        go_on.set()
        assert (await response.content.read()) == b"data: [DONE]\n\n"


async def test_the_record_is_durable_before_the_end_leaves(proxy: Proxy) -> None:
    await proxy.chat()
    counters = await proxy.counters()
    stored = counters["pawl_records_stored_total"]
    assert counters["pawl_records_total"] >= 1
    assert stored + counters["pawl_records_spooled"] >= 1


async def test_headers_name_episode_agent_and_task_and_are_not_passed_on(
    proxy: Proxy, upstream: FakeUpstream
) -> None:
    headers = {"x-pawl-episode": "e7", "x-pawl-agent": "writer", "x-pawl-task": "t1", "x-my": "1"}
    response = await proxy.chat(headers=headers)
    assert response.headers["x-pawl-episode"] == "e7"
    assert response.headers["x-pawl-policy"] == "m@0"
    assert not any(name.lower().startswith("x-pawl") for name in upstream.headers[0])
    assert upstream.headers[0]["x-my"] == "1"
    [episode] = await proxy.episodes(1)
    assert (episode.key, episode.task, episode.calls[0].agent) == ("e7", "t1", "writer")


async def test_a_name_may_hold_any_letters_and_none_fails_the_call(proxy: Proxy) -> None:
    body = b'{"model":"m","messages":[]}'
    for name, told in (("\u00e9t\u00e9".encode(), "\u00e9t\u00e9"), (b"\xff\xfe", None)):
        reply = await raw_ask(
            int(proxy.settings.listen.rpartition(":")[2]),
            post("/v1/chat/completions", body, b"x-pawl-episode: " + name),
        )
        assert reply.startswith(b"HTTP/1.1 200")
        if told is None:
            assert b"x-pawl-warning: x-pawl-episode" in reply
        else:
            assert b"x-pawl-episode: " + told.encode() in reply
            assert (await proxy.feedback({"value": 1, "episode": told}))[0] == 200


async def test_the_url_names_them_too(proxy: Proxy) -> None:
    await proxy.chat(path="/task/t1/episode/e8/agent/checker")
    [episode] = await proxy.episodes(1)
    assert (episode.key, episode.task, episode.calls[0].agent) == ("e8", "t1", "checker")


async def test_a_malformed_tool_status_is_a_warning_and_the_call_goes_through(
    proxy: Proxy,
) -> None:
    response = await proxy.chat(headers={"x-pawl-tool-status": "broken;;"})
    assert response.status == 200
    assert "x-pawl-tool-status" in response.headers["x-pawl-warning"]
    assert (await proxy.counters())["pawl_warnings_total"] >= 1
    await proxy.only_call()


async def test_tool_events_are_stored(proxy: Proxy) -> None:
    headers = {"x-pawl-episode": "e", "x-pawl-tool-status": 'error;id="c1";detail="exit 2"'}
    await proxy.chat(headers=headers)
    [episode] = await proxy.episodes(1)
    assert [(e.tool_id, e.status) for e in episode.stray_tool_events] == [("c1", "error")]


async def test_malformed_json_reaches_the_upstream_which_says_so(proxy: Proxy) -> None:
    url = f"{proxy.url}/v1/chat/completions"
    async with proxy.session.post(url, data=b'{"model": ') as response:
        assert response.status == 400
        assert "JSON" in (await response.json())["error"]["message"]
    call = await proxy.only_call()
    assert (call.request, call.trainable, call.reason) == (None, False, "error_reply")


async def test_admin_endpoints_are_refused_with_a_clear_error(
    proxy: Proxy, upstream: FakeUpstream
) -> None:
    async with proxy.session.post(f"{proxy.url}/v1/load_lora_adapter", json={}) as response:
        assert response.status == 404
        assert response.headers["x-pawl-fault"] == "client"
        assert "load_lora_adapter" in (await response.json())["error"]["message"]
    assert upstream.other == []


async def test_other_allowed_paths_are_forwarded_untouched(
    proxy: Proxy, upstream: FakeUpstream
) -> None:
    url = URL(f"{proxy.url}/v1/embeddings?x=%2F", encoded=True)
    async with proxy.session.post(url, data=b"\x00\x01") as response:
        assert await response.read() == b"other:\x00\x01"
        assert response.headers["x-upstream"] == "1"
    assert upstream.other == [("POST", "/v1/embeddings?x=%2F", b"\x00\x01")]


async def test_a_server_that_is_not_vllm_gets_the_clients_own_bytes(
    proxy: Proxy, upstream: FakeUpstream
) -> None:
    upstream.owned_by = "somebody"
    await proxy.chat()
    assert "return_token_ids" not in upstream.requests[0]
    call = await proxy.only_call()
    assert (call.trainable, call.reason) == (False, "no_token_ids")


async def promote_version_1(proxy: Proxy) -> None:
    async with proxy.engine.begin() as connection:
        await connection.execute(
            text(
                "INSERT INTO updates (id, policy, parent_version, version, state, recipe)"
                " VALUES (uuidv7(), 'm', 0, 1, 'done', '{}')"
            )
        )
        await connection.execute(
            text(
                "INSERT INTO policies (name, version, state, served_name, update_id)"
                " SELECT 'm', 1, 'published', 'm@1', id FROM updates"
            )
        )
        await promote(connection, "m", 1, reason="for the test", actor="operator")

    async def swapped() -> bool:
        return (await proxy.chat()).headers["x-pawl-policy"] == "m@1"

    await eventually(swapped)


async def test_an_episode_keeps_its_version_across_a_swap(
    proxy: Proxy, upstream: FakeUpstream
) -> None:
    await proxy.chat(headers={"x-pawl-episode": "old"})
    await promote_version_1(proxy)
    response = await proxy.chat(headers={"x-pawl-episode": "old"})
    assert response.headers["x-pawl-policy"] == "m@0"
    assert upstream.requests[-1]["model"] == "m"
    response = await proxy.chat(headers={"x-pawl-episode": "new"})
    assert upstream.requests[-1]["model"] == "m@1"
    assert response.json["model"] == "m"


@pytest.mark.usefixtures("_patient_lookups")
async def test_an_episode_keeps_its_version_at_another_proxy(
    proxy: Proxy, database_url: str, upstream: FakeUpstream, tmp_path: Path
) -> None:
    settings = settings_for(database_url, upstream.url, tmp_path / "other")
    async with proxy_with(settings, proxy.engine) as other:
        await proxy.chat(headers={"x-pawl-episode": "old"})
        await proxy.episodes(1)
        await promote_version_1(proxy)
        await other.chat(headers={"x-pawl-episode": "unknown before"})
        response = await other.chat(headers={"x-pawl-episode": "old"})
    assert response.headers["x-pawl-policy"] == "m@0"


async def test_health_and_readiness(proxy: Proxy) -> None:
    for path in ("/healthz", "/readyz", "/metrics"):
        async with proxy.session.get(proxy.admin + path) as response:
            assert response.status == 200
    async with proxy.session.get(proxy.url + "/metrics") as response:
        assert response.status == 404


async def test_two_proxies_do_not_share_a_spool(proxy: Proxy, tmp_path: Path) -> None:
    other = settings_for(None, "http://127.0.0.1:1/v1", tmp_path)
    with pytest.raises(SpoolInUse, match="PAWL_SPOOL_DIR"):
        async with running(other):
            pass


async def test_numbers_of_any_size_are_passed_on_and_kept(
    proxy: Proxy, upstream: FakeUpstream
) -> None:
    seed = 10**30
    headers = {"x-stainless-retry-count": "9" * 50}
    assert (await proxy.chat(seed=seed, top_k=seed, headers=headers)).status == 200
    assert upstream.requests[-1]["seed"] == seed
    call = await proxy.only_call()
    assert json.loads(call.request or b"")["seed"] == seed
    assert call.sampling["top_k"] == seed
    assert call.reason == "unreadable_sampling"


async def test_what_the_server_uses_by_itself_is_recorded(
    database_url: str, engine: AsyncEngine, upstream: FakeUpstream, tmp_path: Path
) -> None:
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
    card = {"default_temperature": 0.6, "default_sampling": {"top_p": 0.95, "top_k": 20}}
    settings = settings_for(database_url, upstream.url, tmp_path).model_copy(update=card)
    async with proxy_with(settings, engine) as proxy:
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
async def test_strict_tools_are_trained_where_the_servers_parser_is_known(
    database_url: str,
    engine: AsyncEngine,
    upstream: FakeUpstream,
    tmp_path: Path,
    parser: str | None,
    reason: str | None,
) -> None:
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
    settings = settings_for(database_url, upstream.url, tmp_path)
    settings = settings.model_copy(update={"tool_parser": parser})
    tool = {"type": "function", "function": {"name": "f", "strict": True}}
    async with proxy_with(settings, engine) as proxy:
        assert (await proxy.chat(tools=[tool])).status == 200
        call = await proxy.only_call()
    assert call.reason == reason
    # With a syntax of its own the server held the call to it; nothing else holds one.
    assert ("grammar" in call.sampling) == (parser == "hermes")


async def test_a_tool_conversation_without_any_name_is_one_episode(proxy: Proxy) -> None:
    user = {"role": "user", "content": "q"}
    first = await proxy.chat(messages=[user], tools=[{"type": "function"}])
    message = first.json["choices"][0]["message"]
    result = {"role": "tool", "content": "1", "tool_call_id": message["tool_calls"][0]["id"]}
    second = await proxy.chat(messages=[user, message, result], tools=[{"type": "function"}])
    assert second.headers["x-pawl-episode"] == first.headers["x-pawl-episode"]
    assert (await proxy.feedback({"value": 1, "response": second.json["id"]}))[0] == 200

    async def scored() -> bool:
        [episode] = await proxy.episodes(2)
        return [f.value for f in episode.feedback] == [1.0]

    assert await eventually(scored)
