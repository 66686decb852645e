"""A key beyond its limits gets 429, when to come back, and nobody else is refused for it."""

import asyncio
from typing import Any, Final

import pytest
from aiohttp import web
from sqlalchemy.ext.asyncio import AsyncEngine

from store.grants import Limits, Scope
from tests.integration.conftest import Proxy
from tests.support.proxy.keys import bearer, made, taken
from tests.support.servers.fake_upstream import FakeUpstream
from tests.support.waiting import eventually, until

MESSAGES: Final = "/v1/messages"


async def two_keys(
    proxy: Proxy, engine: AsyncEngine, *scopes: Scope, **limits: int
) -> tuple[dict[str, str], dict[str, str]]:
    """The headers of a key with limits and of one without, once the proxy knows both."""
    limited = await made(engine, "limited", *scopes, limits=Limits(**limits))
    free = await made(engine, "free", "infer", "read")
    await taken(proxy, free)
    return bearer(limited), bearer(free)


async def test_request_beyond_a_keys_limit_a_minute_is_429_with_retry_after(
    proxy: Proxy, engine: AsyncEngine, upstream: FakeUpstream
) -> None:
    few, free = await two_keys(proxy, engine, "infer", per_minute=3)
    replies = [await proxy.chat(headers=few) for _ in range(5)]
    assert [reply.status for reply in replies] == [200, 200, 200, 429, 429]
    refused = replies[-1]
    assert refused.headers["x-pawl-fault"] == "client"
    assert 1 <= int(refused.headers["Retry-After"]) <= 60
    assert refused.json["error"]["code"] == "rate_limit_exceeded"
    assert "3 requests a minute" in refused.json["error"]["message"]
    assert len(upstream.requests) == 3
    refused = await proxy.ask("POST", MESSAGES, few, model="m")
    assert (refused.status, refused.json["error"]["type"]) == (429, "rate_limit_error")
    assert (await proxy.chat(headers=free)).status == 200


async def test_request_beyond_a_keys_concurrency_limit_is_429_until_another_request_ends(
    proxy: Proxy, engine: AsyncEngine, upstream: FakeUpstream
) -> None:
    two, _ = await two_keys(proxy, engine, "infer", at_once=2)
    go_on = asyncio.Event()

    async def wait(_: web.Request) -> web.Response:
        await go_on.wait()
        return web.json_response({"choices": []})

    upstream.behave = wait
    running = [asyncio.create_task(proxy.chat(headers=two)) for _ in range(3)]
    refused = await next(asyncio.as_completed(running))
    assert (refused.status, refused.headers["Retry-After"]) == (429, "1")
    go_on.set()
    assert sorted([(await task).status for task in running]) == [200, 200, 429]
    assert (await proxy.chat(headers=two)).status == 200


@pytest.mark.parametrize(("stream", "limit"), [(False, 3), (True, 9)])
async def test_call_is_429_once_its_keys_tokens_of_the_minute_are_used_up(
    proxy: Proxy, engine: AsyncEngine, upstream: FakeUpstream, stream: bool, limit: int
) -> None:
    # Each of the server's replies takes three tokens of a prompt and two of its own, as its ids
    # say, and two as the usage of a whole reply says.
    few, free = await two_keys(proxy, engine, "infer", tokens_per_minute=limit)
    replies = [await proxy.chat(headers=few, stream=stream) for _ in range(3)]
    assert [reply.status for reply in replies] == [200, 200, 429]
    refused = replies[-1]
    assert 1 <= int(refused.headers["Retry-After"]) <= 60
    assert f"limited to {limit} tokens a minute" in refused.json["error"]["message"]
    assert len(upstream.requests) == 2
    assert (await proxy.chat(headers=free)).status == 200


async def test_feedback_is_accepted_after_a_keys_tokens_of_the_minute_are_used_up(
    proxy: Proxy, engine: AsyncEngine
) -> None:
    key, _ = await two_keys(proxy, engine, "infer", "feedback", tokens_per_minute=1)
    await proxy.chat("/episode/e1", key)
    assert (await proxy.chat(headers=key)).status == 429
    assert (await proxy.feedback({"value": 1.0, "episode": "e1"}, **key))[0] == 200


async def test_each_feedback_statement_of_a_list_counts_towards_the_keys_limit(
    proxy: Proxy, engine: AsyncEngine
) -> None:
    few, _ = await two_keys(proxy, engine, "feedback", per_minute=3)
    reward = {"value": 1.0, "episode": "e1"}
    status, body = await proxy.feedback([reward] * 4, **few)
    assert (status, "send them in parts" in body["error"]["message"]) == (400, True)
    status, body = await proxy.feedback([reward] * 3, **few)
    assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
    few = bearer(await made(engine, "other", "feedback", limits=Limits(per_minute=3)))
    await taken(proxy, few["Authorization"].removeprefix("Bearer "))
    said: list[object] = [[reward] * 2, reward, reward]
    assert [(await proxy.feedback(one, **few))[0] for one in said] == [202, 202, 429]


async def test_request_of_a_client_that_leaves_frees_its_place_in_the_concurrency_limit(
    proxy: Proxy, engine: AsyncEngine, upstream: FakeUpstream
) -> None:
    one, _ = await two_keys(proxy, engine, "infer", at_once=1)

    async def wait(_: web.Request) -> Any:
        await asyncio.Event().wait()

    upstream.behave = wait
    leaving = asyncio.create_task(proxy.chat(headers=one))
    await until(lambda: len(upstream.requests) == 1)
    assert (await proxy.chat(headers=one)).status == 429
    leaving.cancel()
    upstream.behave = None

    async def let_in() -> bool:
        return (await proxy.chat(headers=one)).status == 200

    await eventually(let_in)


async def test_key_limits_apply_at_the_admin_port_too(proxy: Proxy, engine: AsyncEngine) -> None:
    few, free = await two_keys(proxy, engine, "read", per_minute=3, at_once=1)
    replies = [await proxy.admin_page("/metrics", few) for _ in range(5)]
    assert [reply.status for reply in replies] == [200, 200, 200, 429, 429]
    assert 1 <= int(replies[-1].headers["Retry-After"]) <= 60
    assert replies[-1].headers["x-pawl-fault"] == "client"
    assert (await proxy.admin_page("/metrics", free)).status == 200
