"""Text that a rule takes out is nowhere: not on disk, in the database, in metrics or in logs."""

import asyncio
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine
from structlog.testing import capture_logs

from pawl.export import export
from proxy.settings import ProxySettings
from store.records import Tokens
from store.selecting import Selection
from store.version_states import ensure_base
from tests.integration.conftest import Proxy, proxy_with, settings_for, working
from tests.support.proxy.kept_files import files_below, rows_of
from tests.support.servers.fake_upstream import DONE, FakeUpstream, answers, streams

RULES = """
[[rule]]
name = "canary"
pattern = 'canary-[0-9]{4}'

[[rule]]
name = "user"
field = "request.user"
"""
FINDS = (b"canary-", b"nobody@example.org", b"secret-")
# Of a client's headers nothing is ever stored, with rules or without.
HEADERS = {
    "Authorization": "Bearer secret-a-1234",
    "api-key": "secret-b-1234",
    "x-api-key": "secret-c-1234",
    "Cookie": "session=secret-d-1234",
    "Proxy-Authorization": "Basic secret-e-1234",
    "X-Custom-Token": "secret-f-1234",
}


def hit(data: bytes) -> list[bytes]:
    """Find what of the canaries is in some bytes, as they are or as PostgreSQL writes bytes."""
    return [one for one in FINDS if one in data or one.hex().encode() in data]


def leaks(places: Iterable[bytes]) -> list[list[bytes]]:
    return [found for found in map(hit, places) if found]


@pytest.fixture
async def settings(
    database_url: str, engine: AsyncEngine, upstream: FakeUpstream, tmp_path: Path
) -> ProxySettings:
    """Rules for a proxy whose policy `m` is the base model."""
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
    rules = tmp_path / "rules.toml"
    rules.write_text(RULES)
    folder = tmp_path / "of-proxy"
    folder.mkdir()
    return settings_for(database_url, upstream.url, folder).model_copy(update={"redaction": rules})


def said(*contents: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": one} for one in contents]}


def said_in_pieces(at: int, piece: str) -> bytes:
    choice = {"index": 0, "delta": {"content": piece}, "token_ids": [at]}
    choice |= {"finish_reason": "stop" if piece.endswith(".") else None}
    event = {"id": "chatcmpl-s", "model": "m", "choices": [choice]}
    return b"data: " + json.dumps(event).encode() + b"\n\n"


# A reply that says a canary, in pieces.
SPLIT = streams(*map(said_in_pieces, range(4), ("it is can", "ary-", "12", "34.")), DONE)
NO_JSON = answers(b"<p>canary-1234</p>", 502, **{"Content-Type": "text/html"})


async def all_kinds(proxy: Proxy, upstream: FakeUpstream) -> None:
    """Calls and feedback that say canaries in every place that is recorded."""
    tool = 'error;id="call_1";detail="exit canary-1234"'
    await proxy.chat(headers=HEADERS | {"x-pawl-tool-status": tool}, **said("a canary-1234"))
    await proxy.chat(headers=HEADERS, user="nobody@example.org", **said("q"))
    await proxy.chat(headers=HEADERS, stop="canary-1234", **said("q"))
    raw = b'{"model": "m", "messages": [{"role": "user", "content": "\\u0063anary-1234"}]}'
    for body in (raw, b"no JSON, but canary-1234"):
        await proxy.ask("POST", "/v1/chat/completions", HEADERS, data=body)
    for behave in (SPLIT, NO_JSON):
        upstream.behave = behave
        reply = await proxy.chat(headers=HEADERS, stream=behave is SPLIT, **said("q"))
        # What the client gets is what the upstream says.
        assert b"1234" in reply.body or b"34." in reply.body
    upstream.behave = None
    statement = {"metric": "tool_status", "value": "error", "id": "x", "episode": "e"}
    status, _ = await proxy.feedback(statement | {"detail": "canary-1234"}, **HEADERS)
    assert status == 202
    # One that says nothing of the kind.
    assert (await proxy.chat(path="/episode/clean", headers=HEADERS)).status == 200


async def test_redacted_text_is_in_no_file_table_log_metric_or_export(
    settings: ProxySettings, engine: AsyncEngine, upstream: FakeUpstream
) -> None:
    with capture_logs() as logs:
        async with working(settings), aiohttp.ClientSession() as session:
            await all_kinds(Proxy(settings, engine, session), upstream)
            # Nothing is stored yet: all is in the spool, as the worker wrote it.
            spooled = files_below(settings.spool_dir)
            assert any(b"clean" in one for one in spooled)
            assert leaks(spooled) == []
        async with proxy_with(settings, engine) as proxy:
            episodes = await proxy.episodes(8)
            told = (await proxy.admin_page("/metrics")).body
    exported = io.BytesIO()
    await export(engine, Selection(), exported)
    stored = await rows_of(engine)
    assert exported.getvalue()
    assert len(stored) > 20
    places = [
        *stored,
        *files_below(settings.spool_dir),
        told,
        str(logs).encode(),
        exported.getvalue(),
    ]
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


async def test_redacted_stream_is_stored_as_a_whole_redacted_reply(
    settings: ProxySettings, engine: AsyncEngine, upstream: FakeUpstream
) -> None:
    upstream.behave = SPLIT
    async with proxy_with(settings, engine) as proxy:
        await proxy.chat(stream=True)
        call = await proxy.only_call()
    reply = json.loads(call.reply or b"")
    assert reply["choices"][0]["message"]["content"] == "it is [redacted]."
    assert (call.trainable, call.reason, call.status) == (False, "redacted", "complete")


async def test_call_recorded_before_a_rule_was_set_is_redacted_when_it_is_stored(
    settings: ProxySettings, engine: AsyncEngine
) -> None:
    before = settings.model_copy(update={"redaction": None})
    async with working(before), aiohttp.ClientSession() as session:
        await Proxy(before, engine, session).chat(**said("canary-1234"))
    assert any(map(hit, files_below(settings.spool_dir)))
    async with proxy_with(settings, engine) as proxy:
        assert (await proxy.only_call()).reason == "redacted"
    assert leaks(await rows_of(engine)) == []


async def test_worker_with_redaction_rules_writes_all_records_before_it_ends(
    settings: ProxySettings, engine: AsyncEngine
) -> None:
    async with working(settings), aiohttp.ClientSession() as session:
        proxy = Proxy(settings, engine, session)
        await asyncio.gather(*(proxy.chat(**said(f"canary-1234 {n}")) for n in range(20)))
    async with proxy_with(settings, engine) as proxy:
        assert len(await proxy.episodes(20)) == 20
