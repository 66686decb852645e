"""What goes wrong at the upstream or the client: it is passed on as it is, and recorded."""

import asyncio
import io

import aiohttp
import pytest
from aiohttp import web

from tests.integration.conftest import Proxy
from tests.support.servers.fake_upstream import FakeUpstream, Handler
from tests.support.waiting import PATIENCE_S


async def test_errors_of_the_upstream_reach_the_client_byte_for_byte(
    proxy: Proxy, upstream: FakeUpstream
) -> None:
    async def limited(_: web.Request) -> web.Response:
        return web.Response(status=429, body=b"<html>slow down", headers={"Retry-After": "7"})

    upstream.behave = limited
    response = await proxy.chat()
    assert (response.status, response.body) == (429, b"<html>slow down")
    assert response.headers["Retry-After"] == "7"
    assert (await proxy.only_call()).reason == "error_reply"


async def test_an_unreachable_upstream_is_said_so_and_recorded(
    proxy: Proxy, upstream: FakeUpstream
) -> None:
    upstream.behave = gone
    response = await proxy.chat()
    assert response.status == 502
    assert response.headers["x-pawl-fault"] == "upstream"
    assert "gave no reply" in response.json["error"]["message"]
    assert (await proxy.only_call()).status == "upstream_error"


async def test_a_torn_stream_ends_torn_and_is_recorded(
    proxy: Proxy, upstream: FakeUpstream
) -> None:
    async def torn(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"id":"r","choices":[]}\n\n')
        assert request.transport is not None
        request.transport.abort()
        return response

    upstream.behave = torn
    with pytest.raises(aiohttp.ClientPayloadError):
        await proxy.chat(stream=True)
    call = await proxy.only_call()
    assert (call.status, call.reason) == ("truncated", "incomplete")


async def test_a_client_that_leaves_stops_the_generation_and_leaves_a_record(
    proxy: Proxy, upstream: FakeUpstream
) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            while True:
                await response.write(b'data: {"choices":[]}\n\n')
                await asyncio.sleep(0.01)
        except (asyncio.CancelledError, ConnectionError):
            upstream.cancelled.set()
            raise

    upstream.behave = endless
    url = f"{proxy.url}/v1/chat/completions"
    async with proxy.session.post(url, json={"model": "m", "stream": True}) as response:
        await response.content.readany()
        response.close()
    await asyncio.wait_for(upstream.cancelled.wait(), PATIENCE_S)
    assert (await proxy.only_call()).status == "client_gone"


async def gone(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def busy(_: web.Request) -> web.Response:
    return web.Response(status=503)


async def test_a_body_that_is_too_large_is_refused_by_name(
    proxy: Proxy, upstream: FakeUpstream
) -> None:
    url, body = f"{proxy.url}/v1/chat/completions", io.BytesIO(b"x" * (2**20 + 1))
    async with proxy.session.post(url, data=body) as response:
        assert response.status == 413
        assert "PAWL_MAX_BODY_MB" in (await response.json())["error"]["message"]
    assert upstream.requests == []


@pytest.mark.parametrize("failure", [gone, busy])
async def test_a_retry_by_the_clients_sdk_is_one_call_with_the_attempt_that_failed(
    proxy: Proxy, upstream: FakeUpstream, failure: Handler
) -> None:
    upstream.behave = failure
    failed = await proxy.chat()
    upstream.behave = None
    again = await proxy.chat(headers={"x-stainless-retry-count": "1"})
    assert again.headers["x-pawl-episode"] == failed.headers["x-pawl-episode"]
    other = await proxy.chat(headers={"x-stainless-retry-count": "1"})
    assert other.headers["x-pawl-episode"] != failed.headers["x-pawl-episode"]
    [episode, _] = await proxy.episodes(2)
    [call] = episode.calls
    assert (str(call.id), call.method) == (again.headers["x-pawl-call"], "retry")
    assert (call.status, call.trainable) == ("complete", True)
