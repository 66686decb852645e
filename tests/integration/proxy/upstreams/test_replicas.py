"""Replicas of one model server: who is asked, and what is never sent twice."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from aiohttp import web

from benchmarks.stack import free_port
from proxy.errors import UpstreamBroke, UpstreamUnreachable
from proxy.upstreams.server import Upstream
from tests.support.servers.fake_upstream import FakeUpstream, fake_upstream
from tests.support.waiting import eventually

BODY = b'{"model":"m","messages":[]}'
CHAT = "/v1/chat/completions"


@pytest.fixture
async def two() -> AsyncIterator[tuple[FakeUpstream, FakeUpstream]]:
    async with fake_upstream() as one, fake_upstream() as other:
        yield one, other


async def ask(upstream: Upstream) -> int:
    reply = await upstream.ask("POST", CHAT, [], BODY)
    await reply.read()
    return reply.status


async def test_the_least_busy_is_asked(two: tuple[FakeUpstream, FakeUpstream]) -> None:
    go_on = asyncio.Event()

    async def wait(_: web.Request) -> web.Response:
        await go_on.wait()
        return web.json_response({})

    for one in two:
        one.behave = wait
    upstream = Upstream([one.url for one in two], silence_s=60)
    asked = []
    for number in range(6):
        asked.append(asyncio.create_task(ask(upstream)))

        async def arrived(wanted: int = number + 1) -> bool:
            return sum(len(one.requests) for one in two) == wanted

        await eventually(arrived)
    assert [len(one.requests) for one in two] == [3, 3]
    go_on.set()
    assert await asyncio.gather(*asked) == [200] * 6
    await upstream.close()


async def test_one_that_refuses_is_passed_over_avoided_and_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("proxy.upstreams.server.AVOID_S", 600.0)
    port = free_port()
    async with AsyncExitStack() as exits:
        up = await exits.enter_async_context(fake_upstream())
        upstream = Upstream([f"http://127.0.0.1:{port}/v1", up.url], silence_s=60)
        down = upstream.replicas[0]
        assert [await ask(upstream) for _ in range(3)] == [200] * 3
        assert len(up.requests) == 3
        # The first request found out; the others did not try.
        assert down.avoid_until > asyncio.get_running_loop().time()
        assert [replica.root for replica in upstream._in_order()][-1] == down.root

        back = await exits.enter_async_context(fake_upstream(port))
        down.avoid_until = asyncio.get_running_loop().time()
        upstream.replicas[1].pool.close()

        async def asked_again() -> bool:
            await asyncio.gather(ask(upstream), ask(upstream))
            return bool(back.requests)

        await eventually(asked_again)
        await upstream.close()


async def test_what_was_sent_is_never_sent_again(two: tuple[FakeUpstream, FakeUpstream]) -> None:
    async def break_off(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    for one in two:
        one.behave = break_off
    upstream = Upstream([one.url for one in two], silence_s=60)
    with pytest.raises(UpstreamBroke, match="was sent the request and gave no reply"):
        await ask(upstream)
    assert sum(len(one.requests) for one in two) == 1
    await upstream.close()


async def test_an_error_of_one_is_its_answer(two: tuple[FakeUpstream, FakeUpstream]) -> None:
    async def overloaded(_: web.Request) -> web.Response:
        return web.Response(status=503)

    for one in two:
        one.behave = overloaded
    upstream = Upstream([one.url for one in two], silence_s=60)
    assert await ask(upstream) == 503
    assert sum(len(one.requests) for one in two) == 1
    await upstream.close()


async def test_where_none_is_reached_all_are_named() -> None:
    urls = [f"http://127.0.0.1:{free_port()}/v1" for _ in range(2)]
    upstream = Upstream(urls, silence_s=60, named_in="upstream 'local' of u.toml")
    with pytest.raises(UpstreamUnreachable, match=r"and http.*is upstream 'local' of u\.toml"):
        await ask(upstream)
    assert all(replica.avoid_until for replica in upstream.replicas)
