"""A version that the store lists and a replica lacks: waited for, asked for elsewhere, never a 404.

So it is after a model server was restarted, until its adapters are loaded again.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from aiohttp import web
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.calls import call as steps
from proxy.policies.version_file import VersionFile
from proxy.upstreams.server import Upstream
from store.version_queries import mark_files_deleted
from tests.integration.conftest import Proxy, StartProxy
from tests.support.ledger.lineage import promote, set_state, trained, unload
from tests.support.servers.fake_upstream import FakeUpstream, answers, fake_upstream, whole_reply
from tests.support.waiting import PATIENCE_S, eventually, until

VERSION = "m@1"


def like_vllm(server: FakeUpstream) -> FakeUpstream:
    """Let it answer a model that it does not list as vLLM does."""

    async def behave(_: web.Request) -> web.StreamResponse:
        asked = server.requests[-1]
        if asked["model"] in server.models:
            if asked.get("stream"):
                return await server.stream(_, asked)
            return web.json_response(whole_reply(asked, len(server.requests)))
        said = f"The model `{asked['model']}` does not exist."
        error = {"message": said, "type": "NotFoundError", "param": "model", "code": 404}
        return web.json_response({"error": error}, status=404)

    server.behave = behave
    return server


async def publish(engine: AsyncEngine, *states: str) -> None:
    """Versions 1, 2, … in these states; one that serves, if none is named."""
    states = states or ("serving",)
    async with engine.begin() as connection:
        await trained(connection, *[0] * len(states))
        for version, state in enumerate(states, 1):
            if state == "serving":
                await promote(connection, "m", version, reason="for the test", actor="operator")
            else:
                await set_state(connection, "m", version, "unloaded")
            if state == "deleted":
                assert await mark_files_deleted(connection, "m", [version]) == {version}


@pytest.fixture
async def proxy(
    engine: AsyncEngine, upstream: FakeUpstream, start_proxy: StartProxy
) -> AsyncIterator[Proxy]:
    like_vllm(upstream)
    await publish(engine)
    async with start_proxy() as made:
        yield made


async def later(server: FakeUpstream, after_s: float = 0.5) -> None:
    """The adapter is loaded a moment after it was asked for."""
    await until(lambda: bool(server.requests))
    await asyncio.sleep(after_s)
    server.models.append(VERSION)


@pytest.mark.parametrize("asked", ["m", VERSION])
@pytest.mark.parametrize("stream", [False, True])
async def test_call_waits_until_its_version_is_loaded(
    proxy: Proxy, upstream: FakeUpstream, asked: str, stream: bool
) -> None:
    loading = asyncio.create_task(later(upstream))
    reply = await proxy.chat(model=asked, stream=stream)
    await loading
    assert reply.status == 200
    assert reply.headers["x-pawl-policy"] == VERSION
    # What was refused is sent again as it was, once: not at every look.
    assert [request["model"] for request in upstream.requests] == [VERSION, VERSION]
    call = await proxy.only_call()
    assert (call.status, call.policy_version, call.http_status) == ("complete", 1, 200)
    assert call.trainable


async def test_call_that_waited_too_long_for_its_version_is_503_with_retry_after(
    proxy: Proxy, upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.calls.call.VERSION_WAIT_S", 0.3)
    reply = await proxy.chat()
    assert (reply.status, reply.headers["Retry-After"]) == (503, "2")
    assert reply.headers["x-pawl-fault"] == "upstream"
    assert reply.json["error"]["code"] == "version_not_loaded"
    call = await proxy.only_call()
    assert call.status == "upstream_error"
    upstream.models.append(VERSION)
    assert (await proxy.chat()).status == 200


@pytest.mark.parametrize("is_waited_for", [True, False])
@pytest.mark.parametrize(("asked", "status"), [(VERSION, 404), ("m", 200)])
async def test_waiting_call_takes_the_serving_version_if_its_own_is_unloaded(
    proxy: Proxy,
    upstream: FakeUpstream,
    engine: AsyncEngine,
    monkeypatch: pytest.MonkeyPatch,
    asked: str,
    status: int,
    is_waited_for: bool,
) -> None:
    # Longer than the test waits, however slow the machine is.
    monkeypatch.setattr(steps, "VERSION_WAIT_S", 10 * PATIENCE_S)
    go_on, behave = asyncio.Event(), upstream.behave
    assert behave is not None

    async def slow(request: web.Request) -> web.StreamResponse:
        """Refuse the first call once the proxy knows of it, or before that."""
        if len(upstream.requests) == 1 and not is_waited_for:
            await go_on.wait()
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        return await behave(request)

    upstream.behave = slow
    waiting = asyncio.create_task(proxy.chat("/episode/e", model=asked))
    await until(lambda: bool(upstream.requests))
    async with engine.begin() as connection:
        await promote(connection, "m", 0, reason="for the test", actor="operator")
        await unload(connection, "m", 1)

    async def is_known() -> bool:
        return (await proxy.chat()).headers["x-pawl-policy"] == "m@0"

    if not is_waited_for:
        await eventually(is_known)
    go_on.set()
    reply = await asyncio.wait_for(waiting, PATIENCE_S)
    assert reply.status == status
    # Whoever insists on that version is told why it is not there.
    told = "m@0" if status == 200 else "is retired, and was unloaded"
    assert told in (
        reply.headers["x-pawl-policy"] if status == 200 else reply.json["error"]["message"]
    )


async def test_waiting_calls_share_their_requests_for_the_list_of_models(
    proxy: Proxy, upstream: FakeUpstream
) -> None:
    loading = asyncio.create_task(later(upstream, 1.0))
    before = upstream.looks
    replies = await asyncio.gather(*(proxy.chat(f"/episode/e{n}") for n in range(100)))
    await loading
    assert {reply.status for reply in replies} == {200}
    # Ten a second, however many wait; unshared it would be some hundreds.
    assert upstream.looks - before < 50


async def test_ordinary_call_and_a_base_models_404_request_no_list_of_models(
    proxy: Proxy, upstream: FakeUpstream
) -> None:
    upstream.models.append(VERSION)
    assert (await proxy.chat()).status == 200
    assert upstream.looks == 0
    # Whether the base model gives ids is looked up once.
    assert (await proxy.chat(model="m@0")).status == 200
    before, upstream.models = upstream.looks, [VERSION]
    assert (await proxy.chat(model="m@0")).status == 404
    assert upstream.looks == before


async def test_upstreams_404_about_something_other_than_the_version_is_passed_on(
    proxy: Proxy, upstream: FakeUpstream
) -> None:
    upstream.models.append(VERSION)

    upstream.behave = answers({"error": {"message": "no such image"}}, 404)
    for asked in ("m", VERSION):
        reply = await proxy.chat(model=asked)
        assert (reply.status, reply.json["error"]["message"]) == (404, "no such image")


async def test_call_is_sent_as_it_came_if_the_server_refuses_added_fields(
    proxy: Proxy, upstream: FakeUpstream
) -> None:
    """The server that has the version refuses what the proxy adds."""
    asked: list[dict[str, Any]] = []

    async def behave(request: web.Request) -> web.Response:
        body = json.loads(await request.text())
        asked.append(body)
        if VERSION not in upstream.models:
            upstream.models.append(VERSION)
            return web.json_response({"error": {"message": "no model"}}, status=404)
        if "return_token_ids" in body:
            return web.json_response({"error": {"message": "unknown field"}}, status=400)
        return web.json_response(whole_reply(body, 1))

    upstream.behave = behave
    # The server is vLLM's, as its trainer loaded the adapter there.
    assert (await proxy.chat()).status == 200
    assert ["return_token_ids" in body for body in asked] == [True, True, False]


async def test_client_that_leaves_ends_the_wait_for_its_version(
    proxy: Proxy, upstream: FakeUpstream
) -> None:
    waiting = asyncio.create_task(proxy.chat())
    await until(lambda: bool(upstream.requests))
    waiting.cancel()
    call = await proxy.only_call()
    assert call.status == "client_gone"
    upstream.models.append(VERSION)
    # Nobody asks on its behalf now that the version is there.
    await asyncio.sleep(0.6)
    assert len(upstream.requests) == 1


async def test_retired_version_is_404_with_the_reason(
    engine: AsyncEngine, upstream: FakeUpstream, start_proxy: StartProxy
) -> None:
    like_vllm(upstream)
    await publish(engine, "retired")
    async with start_proxy() as proxy:
        reply = await proxy.chat(model=VERSION)
        assert reply.status == 404
        assert "is retired" in reply.json["error"]["message"]


async def test_deleted_versions_are_explained_although_no_proxy_lists_them(
    engine: AsyncEngine, upstream: FakeUpstream, start_proxy: StartProxy
) -> None:
    """However many there were: what proxies know is bounded by the versions that have files."""
    like_vllm(upstream)
    await publish(engine, *["deleted"] * 20, "retired", "serving")
    async with start_proxy() as proxy:
        listed = VersionFile(proxy.settings.spool_dir).read() or []
        assert [one.version for one in listed] == [0, 21, 22]
        reply = await proxy.chat(model="m@7")
        assert reply.status == 404
        assert "its files were deleted" in reply.json["error"]["message"]


async def test_another_replica_that_has_the_version_is_asked(
    engine: AsyncEngine,
) -> None:
    await publish(engine)
    async with AsyncExitStack() as exits:
        lacks = like_vllm(await exits.enter_async_context(fake_upstream()))
        has = like_vllm(await exits.enter_async_context(fake_upstream()))
        has.models.append(VERSION)
        upstream = Upstream([lacks.url, has.url], silence_s=60)
        body = json.dumps({"model": VERSION, "messages": []}).encode()
        path = "/v1/chat/completions"
        reply = await upstream.ask("POST", path, [], body)
        assert reply.status == 404
        reply.discard()
        again = await upstream.ask_where_served(VERSION, "POST", path, [], body)
        assert again is not None
        assert again.status == 200
        await again.read()
        # From now on, and for a while, the one that lacks it is asked last.
        for _ in range(5):
            reply = await upstream.ask("POST", path, [], body)
            await reply.read()
            assert reply.status == 200
        assert len(lacks.requests) == 1
        has.models.remove(VERSION)

        async def nowhere() -> bool:
            return await upstream.ask_where_served(VERSION, "POST", path, [], body) is None

        await eventually(nowhere)
        await upstream.close()
