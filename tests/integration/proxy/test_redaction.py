"""What a rule takes out is nowhere: not on disk, not in the database, not in what is told of it."""

import asyncio
import io
import json

import aiohttp
from aiohttp import web
from sqlalchemy.ext.asyncio import AsyncEngine
from structlog.testing import capture_logs

from pawl.export import Selection, export
from proxy.settings import ProxySettings
from store.records import Tokens
from tests.integration.conftest import Proxy, proxy_with, working
from tests.support.proxy.redaction import files, hit, leaks, rows, said, settings
from tests.support.servers.fake_upstream import FakeUpstream

__all__ = ["settings"]

# Of a client's headers nothing is ever stored, with rules or without.
HEADERS = {
    "Authorization": "Bearer secret-a-1234",
    "api-key": "secret-b-1234",
    "x-api-key": "secret-c-1234",
    "Cookie": "session=secret-d-1234",
    "Proxy-Authorization": "Basic secret-e-1234",
    "X-Custom-Token": "secret-f-1234",
}


async def split(request: web.Request) -> web.StreamResponse:
    """A reply that says a canary, in pieces."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for at, piece in enumerate(("it is can", "ary-", "12", "34.")):
        choice = {"index": 0, "delta": {"content": piece}, "finish_reason": None, "token_ids": [at]}
        last = {"finish_reason": "stop"} if at == 3 else {}
        event = {"id": "chatcmpl-s", "model": "m", "choices": [choice | last]}
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


async def no_json(_: web.Request) -> web.Response:
    return web.Response(text="<p>canary-1234</p>", status=502, content_type="text/html")


async def all_kinds(proxy: Proxy, upstream: FakeUpstream) -> None:
    """Calls and feedback that say canaries in every place that is recorded."""
    tool = 'error;id="call_1";detail="exit canary-1234"'
    await proxy.chat(headers=HEADERS | {"x-pawl-tool-status": tool}, **said("a canary-1234"))
    await proxy.chat(headers=HEADERS, user="nobody@example.org", **said("q"))
    await proxy.chat(headers=HEADERS, stop="canary-1234", **said("q"))
    raw = b'{"model": "m", "messages": [{"role": "user", "content": "\\u0063anary-1234"}]}'
    url = f"{proxy.url}/v1/chat/completions"
    for body in (raw, b"no JSON, but canary-1234"):
        async with proxy.session.post(url, data=body, headers=HEADERS) as reply:
            await reply.read()
    for behave in (split, no_json):
        upstream.behave = behave
        reply = await proxy.chat(headers=HEADERS, stream=behave is split, **said("q"))
        # What the client gets is what the upstream says.
        assert b"1234" in reply.body or b"34." in reply.body
    upstream.behave = None
    statement = {"metric": "tool_status", "value": "error", "id": "x", "episode": "e"}
    status, _ = await proxy.feedback(statement | {"detail": "canary-1234"}, **HEADERS)
    assert status == 202
    # One that says nothing of the kind.
    assert (await proxy.chat(path="/episode/clean", headers=HEADERS)).status == 200


async def test_what_rules_take_out_is_nowhere(
    settings: ProxySettings, engine: AsyncEngine, upstream: FakeUpstream
) -> None:
    with capture_logs() as logs:
        async with working(settings), aiohttp.ClientSession() as session:
            await all_kinds(Proxy(settings, engine, session), upstream)
            # Nothing is stored yet: all is in the spool, as the worker wrote it.
            spooled = files(settings.spool_dir)
            assert any(b"clean" in one for one in spooled)
            assert leaks(spooled) == []
        async with proxy_with(settings, engine) as proxy:
            episodes = await proxy.episodes(8)
            async with proxy.session.get(f"{proxy.admin}/metrics") as reply:
                told = await reply.read()
    exported = io.BytesIO()
    await export(engine, Selection(), exported)
    stored = await rows(engine)
    assert exported.getvalue()
    assert len(stored) > 20
    places = [*stored, *files(settings.spool_dir), told, str(logs).encode(), exported.getvalue()]
    assert leaks(places) == []
    calls = [call for episode in episodes for call in episode.calls]
    redacted = [call for call in calls if call.reason == "redacted"]
    assert len(redacted) == 7
    assert {call.tokens for call in redacted} == {Tokens()}
    [clean] = [call for call in calls if call.reason != "redacted"]
    assert clean.tokens != Tokens()
    assert b'pawl_redacted_total{rule="canary"}' in told
    assert b'pawl_redacted_total{rule="user"}' in told
    assert b'pawl_withheld_total{reason="not_json"}' in told


async def test_a_redacted_stream_is_stored_as_what_it_said(
    settings: ProxySettings, engine: AsyncEngine, upstream: FakeUpstream
) -> None:
    upstream.behave = split
    async with proxy_with(settings, engine) as proxy:
        await proxy.chat(stream=True)
        call = await proxy.only_call()
    reply = json.loads(call.reply or b"")
    assert reply["choices"][0]["message"]["content"] == "it is [redacted]."
    assert (call.trainable, call.reason, call.status) == (False, "redacted", "complete")


async def test_what_was_recorded_before_a_rule_was_set_is_redacted_when_it_is_stored(
    settings: ProxySettings, engine: AsyncEngine
) -> None:
    before = settings.model_copy(update={"redaction": None})
    async with working(before), aiohttp.ClientSession() as session:
        await Proxy(before, engine, session).chat(**said("canary-1234"))
    assert any(map(hit, files(settings.spool_dir)))
    async with proxy_with(settings, engine) as proxy:
        assert (await proxy.only_call()).reason == "redacted"
    assert leaks(await rows(engine)) == []


async def test_a_worker_with_rules_ends_only_when_all_is_written(
    settings: ProxySettings, engine: AsyncEngine
) -> None:
    async with working(settings), aiohttp.ClientSession() as session:
        proxy = Proxy(settings, engine, session)
        await asyncio.gather(*(proxy.chat(**said(f"canary-1234 {n}")) for n in range(20)))
    async with proxy_with(settings, engine) as proxy:
        assert len(await proxy.episodes(20)) == 20
