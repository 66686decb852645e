"""A key beyond its limits gets 429, when to come back, and nobody else is refused for it."""

import asyncio

import pytest
from aiohttp import web
from sqlalchemy.ext.asyncio import AsyncEngine

from store.keys import Limits, Scope, create_key
from tests.integration.conftest import Proxy
from tests.support.proxy.keys import bearer, made, taken
from tests.support.servers.fake_upstream import FakeUpstream
from tests.support.waiting import eventually, until


async def limited(
    engine: AsyncEngine, name: str, limits: Limits, scope: Scope = "infer"
) -> dict[str, str]:
    async with engine.begin() as connection:
        return bearer((await create_key(connection, name, (scope,), limits)).key)


async def test_request_beyond_the_limit_of_a_minute_is_told_when_to_retry(
    proxy: Proxy, engine: AsyncEngine, upstream: FakeUpstream
) -> None:
    few = await limited(engine, "few", Limits(per_minute=3))
    free = await made(engine, "free", "infer", "read")
    await taken(proxy, free)
    answers = [await proxy.chat(headers=few) for _ in range(5)]
    assert [reply.status for reply in answers] == [200, 200, 200, 429, 429]
    refused = answers[-1]
    assert refused.headers["x-pawl-fault"] == "client"
    assert 1 <= int(refused.headers["Retry-After"]) <= 60
    assert refused.json["error"]["code"] == "rate_limit_exceeded"
    assert "3 requests a minute" in refused.json["error"]["message"]
    assert len(upstream.requests) == 3
    url = f"{proxy.url}/v1/messages"
    async with proxy.session.post(url, json={"model": "m"}, headers=few) as reply:
        assert reply.status == 429
        assert (await reply.json())["error"]["type"] == "rate_limit_error"
    assert (await proxy.chat(headers=bearer(free))).status == 200


async def test_request_beyond_the_limit_at_once_is_let_in_when_another_has_ended(
    proxy: Proxy, engine: AsyncEngine, upstream: FakeUpstream
) -> None:
    two = await limited(engine, "two", Limits(at_once=2))
    free = await made(engine, "free", "infer", "read")
    await taken(proxy, free)
    go_on = asyncio.Event()

    async def wait(_: web.Request) -> web.Response:
        await go_on.wait()
        return web.json_response({"choices": []})

    upstream.behave = wait
    running = [asyncio.create_task(proxy.chat(headers=two)) for _ in range(2)]
    await until(lambda: len(upstream.requests) == 2)
    refused = await proxy.chat(headers=two)
    assert (refused.status, refused.headers["Retry-After"]) == (429, "1")
    go_on.set()
    assert [(await task).status for task in running] == [200] * 2
    assert (await proxy.chat(headers=two)).status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_call_is_refused_once_the_tokens_of_a_minute_are_used_up(
    proxy: Proxy, engine: AsyncEngine, upstream: FakeUpstream, stream: bool
) -> None:
    # Each of the server's replies takes three tokens of a prompt and two of its own, as its ids
    # say, and two as the usage of a whole reply says.
    few = await limited(engine, "few", Limits(tokens_per_minute=9 if stream else 3))
    free = await made(engine, "free", "infer", "read")
    await taken(proxy, free)
    answers = [await proxy.chat(headers=few, stream=stream) for _ in range(3)]
    assert [reply.status for reply in answers] == [200, 200, 429]
    refused = answers[-1]
    assert 1 <= int(refused.headers["Retry-After"]) <= 60
    limit = 9 if stream else 3
    assert f"limited to {limit} tokens a minute" in refused.json["error"]["message"]
    assert len(upstream.requests) == 2
    assert (await proxy.chat(headers=bearer(free))).status == 200


async def test_feedback_is_taken_when_the_tokens_are_used_up(
    proxy: Proxy, engine: AsyncEngine
) -> None:
    async with engine.begin() as connection:
        limits = Limits(tokens_per_minute=1)
        key = (await create_key(connection, "both", ("infer", "feedback"), limits)).key
    await taken(proxy, key)
    await proxy.chat(path="/episode/e1", headers=bearer(key))
    assert (await proxy.chat(headers=bearer(key))).status == 429
    status, _ = await proxy.feedback({"value": 1.0, "episode": "e1"}, **bearer(key))
    assert status == 200


async def test_client_that_leaves_makes_room(
    proxy: Proxy, engine: AsyncEngine, upstream: FakeUpstream
) -> None:
    one = await limited(engine, "one", Limits(at_once=1))
    free = await made(engine, "free", "infer", "read")
    await taken(proxy, free)

    async def wait(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()

    upstream.behave = wait
    leaving = asyncio.create_task(proxy.chat(headers=one))
    await until(lambda: len(upstream.requests) == 1)
    assert (await proxy.chat(headers=one)).status == 429
    leaving.cancel()
    upstream.behave = None

    async def let_in() -> bool:
        return (await proxy.chat(headers=one)).status == 200

    await eventually(let_in)


async def test_admin_port_has_limits_of_its_own(proxy: Proxy, engine: AsyncEngine) -> None:
    few = await limited(engine, "few", Limits(per_minute=3, at_once=1), "read")
    free = await made(engine, "free", "infer", "read")
    await taken(proxy, free)

    async def scraped(headers: dict[str, str]) -> tuple[int, str | None, str | None]:
        async with proxy.session.get(f"{proxy.admin}/metrics", headers=headers) as reply:
            await reply.read()
            told = reply.headers.get("Retry-After"), reply.headers.get("x-pawl-fault")
            return reply.status, *told

    answers = [await scraped(few) for _ in range(5)]
    assert [status for status, *_ in answers] == [200, 200, 200, 429, 429]
    _, wait_s, fault = answers[-1]
    assert 1 <= int(wait_s or 0) <= 60
    assert fault == "client"
    assert (await scraped(bearer(free)))[0] == 200
