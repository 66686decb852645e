"""What a rule takes out is nowhere: not on disk, not in the database, not in what is told of it."""

import asyncio
import io
import json
import os
import shlex
import sys
import time
from collections.abc import Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine
from structlog.testing import capture_logs

from pawl.export import Selection, export
from proxy.errors import BadRedaction
from proxy.keeper.keeper import keeping
from proxy.redaction.program import open_program
from proxy.settings import ProxySettings
from store.records import Tokens, TransitionRow
from store.schema.tables import metadata
from store.updates.policies import ensure_base
from tests.integration.conftest import Proxy, proxy_with, settings_for, working
from tests.support.servers.fake_upstream import FakeUpstream
from tests.support.waiting import eventually, until

RULES = """
[[rule]]
name = "canary"
pattern = 'canary-[0-9]{4}'

[[rule]]
name = "user"
field = "request.user"
"""
# Of a client's headers nothing is ever stored, with rules or without.
HEADERS = {
    "Authorization": "Bearer secret-a-1234",
    "api-key": "secret-b-1234",
    "x-api-key": "secret-c-1234",
    "Cookie": "session=secret-d-1234",
    "Proxy-Authorization": "Basic secret-e-1234",
    "X-Custom-Token": "secret-f-1234",
}
FINDS = (b"canary-", b"nobody@example.org", b"secret-")


def hit(data: bytes) -> list[bytes]:
    """What of the canaries is in some bytes, as they are or as PostgreSQL writes bytes."""
    return [one for one in FINDS if one in data or one.hex().encode() in data]


def leaks(places: Iterable[bytes]) -> list[list[bytes]]:
    return [found for found in map(hit, places) if found]


def files(folder: Path) -> list[bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return [os.fsencode(path) + path.read_bytes() for path in paths]


async def rows(engine: AsyncEngine) -> list[bytes]:
    async with engine.connect() as connection:
        return [
            str(row).encode()
            for name in metadata.tables
            for row in await connection.execute(text(f"SELECT t::text FROM {name} t"))
        ]


@pytest.fixture
async def settings(
    database_url: str, engine: AsyncEngine, upstream: FakeUpstream, tmp_path: Path
) -> ProxySettings:
    """A proxy with rules, whose policy `m` is the base model."""
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
    rules = tmp_path / "rules.toml"
    rules.write_text(RULES)
    folder = tmp_path / "of-proxy"
    folder.mkdir()
    return settings_for(database_url, upstream.url, folder).model_copy(update={"redaction": rules})


def said(*contents: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": one} for one in contents]}


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


PROGRAM = """
import json, pathlib, sys, time

for line in sys.stdin:
    call = json.loads(line)
    said = json.dumps(call)
    if "hang" in said:
        time.sleep(60)
    if "nonsense" in said:
        print("[1", flush=True)
    elif "canary" in said:
        print(json.dumps({"request": {"model": "m", "messages": "gone"}}), flush=True)
    else:
        print("{}", flush=True)
"""


def with_program(
    settings: ProxySettings, folder: Path, program: str, *, wrapped: bool = False
) -> ProxySettings:
    path = folder / "program.py"
    path.write_text(program)
    command = f"{sys.executable} {path}"
    if wrapped:
        # A shell that starts the program as a child, and does not become it.
        command = shlex.join(["sh", "-c", f"{command}; :"])
    changes = {"redaction": None, "redaction_program": command, "redaction_program_s": 4.0}
    return settings.model_copy(update=changes)


async def calls_of(proxy: Proxy, number: int) -> dict[str, TransitionRow]:
    return {one.key: one.calls[0] for one in await proxy.episodes(number)}


@pytest.mark.parametrize("wrapped", [False, True])
async def test_a_program_decides_and_a_call_that_it_fails_over_has_no_content(
    settings: ProxySettings, engine: AsyncEngine, tmp_path: Path, wrapped: bool
) -> None:
    settings = with_program(settings, tmp_path, PROGRAM, wrapped=wrapped)
    async with proxy_with(settings, engine) as proxy:
        for name in ("canary-1234", "hang", "nonsense", "fine"):
            await proxy.chat(path=f"/episode/of-{name[:4]}", **said(name))
        calls = await calls_of(proxy, 4)
        async with proxy.session.get(f"{proxy.admin}/metrics") as reply:
            told = await reply.read()
    assert json.loads(calls["of-cana"].request or b"") == {"model": "m", "messages": "gone"}
    for name in ("of-hang", "of-nons"):
        assert (calls[name].request, calls[name].reply) == (None, None)
    reasons = {name: call.reason for name, call in calls.items()}
    assert reasons == {
        "of-cana": "redacted",
        "of-hang": "redacted",
        "of-nons": "redacted",
        "of-fine": None,
    }
    assert calls["of-fine"].tokens != Tokens()
    assert b'pawl_redacted_total{rule="program"}' in told
    assert b'pawl_withheld_total{reason="program"}' in told
    assert leaks(await rows(engine)) == []


async def test_while_a_program_does_not_work_calls_wait_and_none_is_stored(
    settings: ProxySettings, engine: AsyncEngine, tmp_path: Path
) -> None:
    settings = with_program(settings, tmp_path, "raise SystemExit(1)")
    async with proxy_with(settings, engine) as proxy:
        reply = await proxy.chat(**said("canary-1234"))
        assert reply.status == 200

        async def stuck() -> bool:
            async with proxy.session.get(f"{proxy.admin}/readyz") as answer:
                told = await answer.json()
            drain = told["drain"]
            return drain["state"] == "stuck" and "PAWL_REDACTION_PROGRAM" in drain["reason"]

        await eventually(stuck)
        assert leaks(await rows(engine)) == []
        (tmp_path / "program.py").write_text(PROGRAM)
        call = await proxy.only_call()
    assert call.reason == "redacted"
    assert leaks(await rows(engine)) == []


SLOW = """
import json, pathlib, sys, time

seen = pathlib.Path(sys.argv[0]).with_name("seen")
for line in sys.stdin:
    with seen.open("a") as file:
        file.write("x")
    time.sleep(600 if "stops here" in line else 0.4)
    print("{}", flush=True)
"""


def slow_program(settings: ProxySettings, folder: Path) -> tuple[ProxySettings, Path]:
    """A program that may take its time, and the file with a byte for each call it was asked."""
    made = with_program(settings, folder, SLOW).model_copy(update={"redaction_program_s": 600.0})
    return made, folder / "seen"


def asked(seen: Path) -> int:
    return len(seen.read_bytes()) if seen.exists() else 0


async def recorded(settings: ProxySettings, engine: AsyncEngine, calls: Iterable[str]) -> None:
    """Record these calls, each in an episode of its own, while there is no keeper."""
    async with working(settings), aiohttp.ClientSession() as session:
        proxy = Proxy(settings, engine, session)
        for number, content in enumerate(calls):
            await proxy.chat(path=f"/episode/e{number}", **said(content))


async def stored(engine: AsyncEngine) -> int:
    async with engine.connect() as connection:
        found = await connection.execute(text("SELECT count(*) FROM transitions"))
        return int(found.scalar_one())


async def test_a_keeper_ends_in_time_whatever_a_program_does_and_the_next_one_goes_on(
    settings: ProxySettings, engine: AsyncEngine, tmp_path: Path
) -> None:
    settings, seen = slow_program(settings, tmp_path)
    await recorded(settings, engine, ["q"] * 3 + ["stops here"] + ["q"] * 3)
    async with keeping(settings):
        await until(lambda: asked(seen) == 4)
        began = time.monotonic()
    # What it spends on the rest of the spool at most, and on ending the program.
    assert time.monotonic() - began < settings.keeper_ends_s
    assert await stored(engine) < 7
    (tmp_path / "program.py").write_text(PROGRAM)
    async with proxy_with(settings, engine) as proxy:
        episodes = await proxy.episodes(7)
    assert sorted(len(one.calls) for one in episodes) == [1] * 7


async def test_what_a_slow_program_has_seen_is_stored_before_it_has_seen_the_whole_batch(
    settings: ProxySettings, engine: AsyncEngine, tmp_path: Path
) -> None:
    settings, seen = slow_program(settings, tmp_path)
    await recorded(settings, engine, ["q"] * 5 + ["stops here"])
    async with keeping(settings):
        await until(lambda: asked(seen) == 6)
        # It is asked about the last one and does not answer.
        assert await stored(engine) > 0


@pytest.mark.parametrize(
    ("command", "says"),
    [("no-such-program-of-ours x", "there is no program 'no-such"), ("'a", "split into words")],
)
async def test_a_program_that_is_not_there_is_an_error_at_the_start(
    settings: ProxySettings, command: str, says: str
) -> None:
    settings = settings.model_copy(update={"redaction_program": command})
    with pytest.raises(BadRedaction, match=says):
        open_program(settings)
    async with AsyncExitStack() as exits:
        with pytest.raises(BadRedaction, match=says):
            await exits.enter_async_context(keeping(settings))


async def test_a_worker_with_rules_ends_only_when_all_is_written(
    settings: ProxySettings, engine: AsyncEngine
) -> None:
    async with working(settings), aiohttp.ClientSession() as session:
        proxy = Proxy(settings, engine, session)
        await asyncio.gather(*(proxy.chat(**said(f"canary-1234 {n}")) for n in range(20)))
    async with proxy_with(settings, engine) as proxy:
        assert len(await proxy.episodes(20)) == 20
