"""Replicas of one model server: who is asked, what is never sent twice, and who gives ids."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from benchmarks.stack import free_port
from proxy.errors import NoUpstream, UpstreamBroke, UpstreamUnreachable
from proxy.upstreams import server as module
from proxy.upstreams.server import Upstream
from proxy.upstreams.upstreams import UpstreamMember, Upstreams
from tests.support.servers.fake_upstream import FakeUpstream, answers, fake_upstream, hang_up
from tests.support.waiting import eventually, until

BODY = b'{"model":"m","messages":[]}'
CHAT = "/v1/chat/completions"


@pytest.fixture
async def two(upstream: FakeUpstream) -> AsyncIterator[tuple[FakeUpstream, FakeUpstream]]:
    async with fake_upstream() as other:
        yield upstream, other


@pytest.fixture
async def replicas(two: tuple[FakeUpstream, FakeUpstream]) -> AsyncIterator[Upstream]:
    found = Upstream([one.url for one in two], silence_s=60)
    yield found
    await found.close()


@pytest.fixture
async def single(upstream: FakeUpstream) -> AsyncIterator[Upstream]:
    found = Upstream([upstream.url], silence_s=5)
    yield found
    await found.close()


async def ask(upstream: Upstream) -> int:
    reply = await upstream.ask("POST", CHAT, [], BODY)
    await reply.read()
    return reply.status


async def test_least_busy_replica_gets_the_next_request(
    two: tuple[FakeUpstream, FakeUpstream], replicas: Upstream
) -> None:
    go_on = asyncio.Event()

    async def wait(_: web.Request) -> web.Response:
        await go_on.wait()
        return web.json_response({})

    for one in two:
        one.behave = wait
    asked = []
    for number in range(1, 7):
        asked.append(asyncio.create_task(ask(replicas)))
        await until(lambda number=number: sum(len(one.requests) for one in two) == number)
    assert [len(one.requests) for one in two] == [3, 3]
    go_on.set()
    assert await asyncio.gather(*asked) == [200] * 6


async def test_replica_that_refuses_connections_is_skipped_avoided_and_used_again_later(
    upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AVOID_S", 600.0)
    port = free_port()
    async with AsyncExitStack() as exits:
        both = Upstream([f"http://127.0.0.1:{port}/v1", upstream.url], silence_s=60)
        exits.push_async_callback(both.close)
        down = both.replicas[0]
        assert [await ask(both) for _ in range(3)] == [200] * 3
        assert len(upstream.requests) == 3
        # The first request found out; the others did not try.
        assert down.avoid_until > asyncio.get_running_loop().time()
        assert [replica.root for replica in both._least_busy_first()][-1] == down.root

        back = await exits.enter_async_context(fake_upstream(port))
        down.avoid_until = asyncio.get_running_loop().time()
        both.replicas[1].pool.close()

        async def asked_again() -> bool:
            await asyncio.gather(ask(both), ask(both))
            return bool(back.requests)

        await eventually(asked_again)


async def test_request_that_was_sent_is_never_sent_again(
    two: tuple[FakeUpstream, FakeUpstream], replicas: Upstream
) -> None:
    for one in two:
        one.behave = hang_up
    with pytest.raises(UpstreamBroke, match="was sent the request and gave no reply"):
        await ask(replicas)
    assert sum(len(one.requests) for one in two) == 1


async def test_error_of_a_replica_is_the_answer_and_is_not_retried(
    two: tuple[FakeUpstream, FakeUpstream], replicas: Upstream
) -> None:
    for one in two:
        one.behave = answers(b"", 503)
    assert await ask(replicas) == 503
    assert sum(len(one.requests) for one in two) == 1


async def test_error_names_the_upstream_and_only_the_log_the_replicas_addresses(
    upstream: FakeUpstream,
) -> None:
    upstream.behave = hang_up
    urls = [f"http://u:s3cret@127.0.0.1:{free_port()}/v1" for _ in range(2)]
    down = Upstream(urls, silence_s=60, called="Upstream 'local'")
    breaks = Upstream([upstream.url], silence_s=60, called="Upstream 'local'")
    with capture_logs() as logs:
        for one, error in ((down, UpstreamUnreachable), (breaks, UpstreamBroke)):
            with pytest.raises(error, match=r"^Upstream 'local' ") as told:
                await ask(one)
            assert "127.0.0.1" not in told.value.message
    await breaks.close()
    assert all(replica.avoid_until for replica in down.replicas)
    assert [(line["event"], line["replica"]) for line in logs] == [
        *(("replica_unreachable", replica.root) for replica in down.replicas),
        ("replica_gave_no_reply", breaks.replicas[0].root),
    ]
    assert "s3cret" not in str(logs)


# The list of models says which of them give ids.


async def test_concurrent_look_ups_of_unknown_models_request_the_list_of_models_once(
    upstream: FakeUpstream, single: Upstream
) -> None:
    names = [*(f"unknown {number}" for number in range(50)), "m"]
    found = await asyncio.gather(*(single.gives_ids(name) for name in names))
    assert found == [False] * 50 + [True]
    assert not any([await single.gives_ids(f"new {number}") for number in range(20)])
    assert upstream.looks == 1
    # Unknown names are not kept.
    assert len(single._gives_ids) == 1


async def test_newly_listed_model_is_found_by_the_next_request_for_the_list_of_models(
    upstream: FakeUpstream, single: Upstream
) -> None:
    assert module.LIST_EVERY_S <= 2
    assert not await single.gives_ids("new")
    upstream.models.append("new")
    await eventually(lambda: single.gives_ids("new"))
    assert upstream.looks == 2


async def test_list_of_models_that_fails_is_not_requested_again_by_each_call(
    upstream: FakeUpstream, single: Upstream
) -> None:
    upstream.list_status = 500
    assert not any(await asyncio.gather(*(single.gives_ids("m") for _ in range(30))))
    assert upstream.looks == 1
    upstream.list_status = 200
    await eventually(lambda: single.gives_ids("m"))


async def test_ever_changing_list_of_models_fills_no_memory(single: Upstream) -> None:
    for number in range(30):
        single.learn(f"{number} {name}" for name in range(1000))
    assert len(single._gives_ids) <= module.MOST_NAMES


def test_long_model_name_is_cut_in_the_refusal() -> None:
    known = Upstreams(
        [UpstreamMember("one", ("a",), False, Upstream(["http://a/v1"], silence_s=1))]
    )
    with pytest.raises(NoUpstream) as refused:
        known.for_model("x" * 1_000_000)
    assert len(refused.value.message) < 500
