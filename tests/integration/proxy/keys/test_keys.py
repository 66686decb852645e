"""API keys on both ports: who is let in, for what, and that no key goes any further."""

import asyncio
import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine
from structlog.testing import capture_logs
from typer.testing import CliRunner

from pawl.cli import app
from proxy.error_replies import RefusalLog
from proxy.feedback import LONG_BYTES
from store.database import make_engine
from store.keys import id_in_key, revoke_key
from store.version_states import freeze
from tests.integration.conftest import Proxy, StartProxy, running, settings_for, working
from tests.support.proxy.kept_files import files_below, rows_of
from tests.support.proxy.keys import CALL, bearer, made, status, taken
from tests.support.servers.fake_upstream import FakeUpstream
from tests.support.waiting import eventually, until

EFFECTIVE_S = 2.0
CALLS_BY_KEY = "SELECT e.key, t.api_key FROM transitions t JOIN episodes e ON e.id = t.episode_id"
SAID_BY_KEY = (
    "SELECT DISTINCT f.target, q.api_key FROM feedback f JOIN feedback_requests q"
    " ON q.id = f.request_id"
)
AWAY = "postgresql://nobody@127.0.0.1:1/away"


async def revoked_within(proxy: Proxy, engine: AsyncEngine, name: str, key: str) -> float:
    """Revoke a key that counts; return after how many seconds it does not."""
    await taken(proxy, key)
    assert (await proxy.chat(headers=bearer(key))).status == 200
    clock = asyncio.get_running_loop().time
    async with engine.begin() as connection:
        await revoke_key(connection, name)
    at = clock()

    async def refused() -> bool:
        return (await proxy.chat(headers=bearer(key))).status == 401

    await eventually(refused)
    return clock() - at


async def test_new_api_key_works_and_revoked_key_is_refused_within_two_seconds(
    proxy: Proxy, engine: AsyncEngine
) -> None:
    assert (await proxy.chat()).status == 200
    keys = {name: await made(engine, name, "infer") for name in ("agent", "second", "third")}
    other = await made(engine, "other", "infer")
    # A busy machine may delay one of them.
    assert min([await revoked_within(proxy, engine, *one) for one in keys.items()]) < EFFECTIVE_S
    assert (await proxy.chat(headers=bearer(other))).status == 200
    async with engine.begin() as connection:
        await revoke_key(connection, "other")

    async def locked() -> bool:
        return (await proxy.chat(headers=bearer(other))).status == 401

    # The last key revoked locks the port, loopback or not.
    await eventually(locked)
    assert (await proxy.chat()).status == 401


async def test_each_stored_call_and_reward_has_the_api_key_that_sent_it(
    proxy: Proxy, engine: AsyncEngine
) -> None:
    assert (await proxy.chat("/episode/before")).status == 200
    made_keys = {name: await made(engine, name, "infer", "feedback") for name in ("one", "other")}
    await taken(proxy, made_keys["one"])
    for name, key in made_keys.items():
        assert (await proxy.chat(f"/episode/{name}", bearer(key))).status == 200
        # One that is so long is read beside the loop.
        body = json.dumps({"value": 1, "episode": name}).encode()
        body += b" " * (LONG_BYTES * (name == "one"))
        reply = await proxy.ask("POST", "/feedback", bearer(key), data=body)
        assert reply.status in (200, 202)
    ids = {name: id_in_key(key) for name, key in made_keys.items()}

    async def stored() -> bool:
        async with engine.connect() as connection:
            calls, said = [
                {tuple(row) for row in await connection.execute(text(query))}
                for query in (CALLS_BY_KEY, SAID_BY_KEY)
            ]
        return calls == {("before", None), *ids.items()} and said == set(ids.items())

    await eventually(stored)


async def test_debug_log_lines_of_calls_and_feedback_have_the_api_keys_name(
    proxy: Proxy, engine: AsyncEngine
) -> None:
    key = await made(engine, "agent", "infer", "feedback")
    await taken(proxy, key)
    with capture_logs() as logs:
        assert (await proxy.chat("/episode/e", bearer(key))).status == 200
        said = await proxy.ask("POST", "/feedback", bearer(key), value=1, episode="e")
        assert said.status == 200
    of_calls = [line for line in logs if line["event"] in ("call", "feedback")]
    assert [(line["event"], line["log_level"], line["key"]) for line in of_calls] == [
        ("call", "debug", "agent"),
        ("feedback", "debug", "agent"),
    ]
    assert not [line for line in logs if line["log_level"] == "info" and line.get("key")]


async def test_refused_requests_are_logged_with_the_keys_name(
    proxy: Proxy, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await made(engine, "feeds", "feedback")
    infers = await made(engine, "infers", "infer", tenant="a")
    await taken(proxy, key)
    await taken(proxy, infers)
    # Waiting for the keys may have used up the lines of this minute.
    refusals = RefusalLog()
    for module in ("proxy.error_replies", "proxy.ingester.admin"):
        monkeypatch.setattr(f"{module}.REFUSALS", refusals)
    with capture_logs() as logs:
        await proxy.ask("POST", "/episode/user-42/v1/chat/completions", {}, **CALL)
        await proxy.ask("POST", "/feedback", bearer(key[:-1] + "x"), value=1, episode="e")
        await proxy.ask("POST", "/v1/messages", bearer(key), **CALL)
        await proxy.ask("GET", "/v1/files/file-1", bearer(infers))
        await proxy.ask("GET", "/nowhere", bearer(infers))
        await proxy.admin_page("/metrics", bearer(key))
    refused = [line for line in logs if line["event"] == "refused"]
    assert [
        tuple(line[name] for name in ("status", "reason", "path", "key")) for line in refused
    ] == [
        (401, "missing_api_key", "/v1/chat/completions", None),
        (401, "invalid_api_key", "/feedback", None),
        (403, "missing_scope", "/v1/messages", "feeds"),
        (403, "kept_for_all_tenants", "/v1/files", "infers"),
        (403, "missing_scope", "/metrics", "feeds"),
    ]
    assert {line["client"] for line in refused} == {"127.0.0.1"}


async def test_log_names_keys_that_are_made_and_revoked(proxy: Proxy, engine: AsyncEngine) -> None:
    with capture_logs() as logs:
        await taken(proxy, await made(engine, "agent", "infer"))
        await taken(proxy, await made(engine, "other", "infer"))
        async with engine.begin() as connection:
            await revoke_key(connection, "agent")

        def changes() -> list[tuple[list[str], list[str]]]:
            of_keys = [line for line in logs if line["event"] == "keys"]
            return [(line["added"], line["revoked"]) for line in of_keys]

        await until(lambda: changes() == [(["agent"], []), (["other"], []), ([], ["agent"])])


async def test_log_shows_operators_changes_of_policies(proxy: Proxy, engine: AsyncEngine) -> None:
    with capture_logs() as logs:
        async with engine.begin() as connection:
            await freeze(connection, "m", frozen=True, reason="(by anna)", actor="operator")
            await freeze(connection, "m", frozen=False, reason="it goes on", actor="controller")

        def changes() -> list[Any]:
            return [line for line in logs if line["event"] == "changed_by_hand"]

        await until(lambda: bool(changes()))
    assert changes() == [
        {
            "event": "changed_by_hand",
            "log_level": "info",
            "policy": "m",
            "version": 0,
            "from_state": "serving",
            "to_state": "serving",
            "reason": "frozen: (by anna)",
        }
    ]


async def test_refusal_of_an_api_key_has_the_error_format_of_the_clients_api(
    proxy: Proxy, engine: AsyncEngine
) -> None:
    key = await made(engine, "feeds", "feedback")
    await taken(proxy, key)

    async def refusal(path: str, headers: Mapping[str, str]) -> tuple[int, Mapping[str, str], Any]:
        reply = await proxy.ask("POST", f"/v1/{path}", headers, **CALL)
        return reply.status, reply.headers, reply.json

    chat, messages = "chat/completions", "messages"
    code, headers, body = await refusal(chat, {})
    assert (code, headers["x-pawl-fault"], headers["WWW-Authenticate"]) == (401, "client", "Bearer")
    assert body["error"]["code"] == "missing_api_key"
    code, _, body = await refusal(chat, bearer(key[:-1] + "x"))
    assert (code, body["error"]["code"]) == (401, "invalid_api_key")
    assert key[22:] not in str(body)
    code, headers, body = await refusal(chat, bearer(key))
    assert (code, headers["x-pawl-fault"]) == (403, "client")
    assert "is for feedback, and this request needs infer" in body["error"]["message"]
    code, _, body = await refusal(messages, {"x-api-key": "sk-ant-other"})
    assert (code, body["type"], body["error"]["type"]) == (401, "error", "authentication_error")
    code, _, body = await refusal(messages, {"x-api-key": key})
    assert (code, body["error"]["type"]) == (403, "permission_error")
    page = await proxy.admin_page("/metrics", bearer(key))
    assert (page.status, page.headers["x-pawl-fault"]) == (403, "client")
    assert page.json["error"]["code"] == "missing_scope"


@pytest.mark.parametrize(
    ("access", "relayed", "local"),
    [("loopback", 403, 200), ("anyone", 200, 200), ("keys", 401, 401)],
)
async def test_access_setting_limits_callers_while_no_key_exists(
    access: str, relayed: int, local: int, start_proxy: StartProxy
) -> None:
    async with start_proxy(access=access) as proxy:
        for headers, expected in (({"X-Forwarded-For": "203.0.113.7"}, relayed), ({}, local)):
            assert (await proxy.chat(headers=headers)).status == expected

            async def admin_does_so() -> bool:
                return await status(proxy, "/metrics", headers, "admin") == expected  # noqa: B023

            await eventually(admin_does_so)


async def test_health_needs_no_key_on_either_port(proxy: Proxy, engine: AsyncEngine) -> None:
    await taken(proxy, await made(engine, "agent", "infer"))
    for reply in (await proxy.ask("GET", "/healthz"), await proxy.admin_page("/healthz")):
        assert (reply.status, reply.json) == (200, {"status": "ok"})
    assert (await proxy.ask("POST", "/healthz")).status == 404


async def test_prometheus_scrapes_before_and_after_the_first_key(
    start_proxy: StartProxy, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url)

    def create(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["keys", "create", *arguments])
        assert done.exit_code == 0
        return done.stdout

    async with start_proxy(access="anyone") as proxy:

        async def scraped(credentials: str, expected: int) -> None:
            async def is_so() -> bool:
                # As Prometheus does, which trims the file, and also sends what is empty.
                headers = bearer(credentials.strip())
                return await status(proxy, "/metrics", headers, "admin") == expected

            await eventually(is_so)

        await scraped("", 200)
        await asyncio.to_thread(create, "agent")
        await scraped("", 401)
        await scraped(await asyncio.to_thread(create, "metrics", "--scope", "read"), 200)


@pytest.mark.parametrize("access", ["anyone", "keys"])
async def test_new_replica_without_a_database_refuses_calls_and_is_unhealthy(
    access: str, upstream: FakeUpstream, tmp_path: Path
) -> None:
    settings = settings_for(AWAY, upstream.url, tmp_path).model_copy(update={"access": access})
    async with running(settings), aiohttp.ClientSession() as session:
        proxy = Proxy(settings, make_engine(AWAY), session)
        reply = await proxy.chat()
        assert (reply.status, reply.headers["x-pawl-fault"]) == (503, "proxy")
        assert int(reply.headers["Retry-After"]) >= 1
        # A load balancer asks first.
        assert (await proxy.ask("GET", "/healthz")).status == 503
        assert await status(proxy, "/metrics", {}, "admin") == 503


async def test_keys_work_without_a_database_across_restarts(
    engine: AsyncEngine, upstream: FakeUpstream, start_proxy: StartProxy, tmp_path: Path
) -> None:
    key = await made(engine, "agent", "infer", "read")
    async with start_proxy() as proxy:
        await taken(proxy, key)
    away = settings_for(AWAY, upstream.url, tmp_path)
    async with AsyncExitStack() as exits:
        await exits.enter_async_context(running(away))
        session = await exits.enter_async_context(aiohttp.ClientSession())
        proxy = Proxy(away, make_engine(AWAY), session)
        assert (await proxy.chat(headers=bearer(key))).status == 200
        assert (await proxy.chat()).status == 401
        assert await status(proxy, "/metrics", bearer(key), "admin") == 200
        assert await status(proxy, "/metrics", {}, "admin") == 401


@pytest.mark.parametrize("damage", ["lost", "torn"])
async def test_proxy_with_an_unreadable_key_file_refuses_all_calls_until_it_is_rewritten(
    damage: str, engine: AsyncEngine, start_proxy: StartProxy
) -> None:
    key = await made(engine, "agent", "infer")
    async with start_proxy() as proxy:
        await taken(proxy, key)
    settings = proxy.settings
    file = settings.spool_dir / "access" / "keys.json"
    whole = file.read_bytes()
    if damage == "lost":
        file.unlink()
    else:
        file.write_bytes(whole[: len(whole) // 2])
    for access in ("loopback", "anyone"):
        broken = settings.model_copy(update={"access": access})
        async with working(broken), aiohttp.ClientSession() as session:
            proxy = Proxy(broken, engine, session)
            for headers in (bearer(key), {}):
                reply = await proxy.chat(headers=headers)
                assert (reply.status, reply.headers["x-pawl-fault"]) == (503, "proxy")
                assert int(reply.headers["Retry-After"]) >= 1
    async with start_proxy() as proxy:
        await taken(proxy, key)


async def test_no_key_reaches_the_upstream_logs_files_tables_or_metrics(
    proxy: Proxy, engine: AsyncEngine, upstream: FakeUpstream, tmp_path: Path
) -> None:
    key = await made(engine, "agent", "infer", "feedback", "read")
    revoked = await made(engine, "old", "infer")
    seen: list[Mapping[str, str]] = []

    async def note(request: web.Request) -> web.Response:
        seen.append(request.headers)
        return web.json_response({"data": []})

    upstream.behave_otherwise = note
    wrong = key[:22] + "W" * 43
    # None of them is a client's own key for the provider either.
    others = ("sk-ant-canary-0123456789", "sk-proj-canary-0123456789")
    canaries = [one.encode() for one in (key[22:], revoked[22:], wrong[22:], *others)]
    with capture_logs() as logs:
        await taken(proxy, key)
        async with engine.begin() as connection:
            await revoke_key(connection, "old")

        async def refused() -> bool:
            return await status(proxy, "/v1/embeddings", bearer(revoked)) == 401

        await eventually(refused)
        for headers in (
            {"Authorization": f"Bearer {key}", "x-api-key": others[0]},
            {"x-api-key": key, "Authorization": others[1], "api-key": others[0]},
            bearer(revoked),
            {"x-api-key": wrong},
        ):
            for path in ("/v1/chat/completions", "/v1/embeddings", "/v1/files", "/feedback"):
                await status(proxy, path, headers)
            await status(proxy, "/metrics", headers, "admin")
    await proxy.episodes(2)
    assert len(upstream.headers) == 2
    passed = [str(dict(headers)).encode() for headers in (*upstream.headers, *seen)]
    assert len(passed) > 4
    told = (await proxy.admin_page("/metrics", bearer(key))).body
    files, tables = files_below(tmp_path), await rows_of(engine)
    assert files
    assert tables
    for place in (*passed, told, str(logs).encode(), *files, *tables):
        assert not any(canary in place for canary in canaries)


async def test_upstreams_redirect_to_another_address_is_502_and_not_passed_on(
    proxy: Proxy, engine: AsyncEngine, upstream: FakeUpstream
) -> None:
    key = await made(engine, "agent", "infer", "read")
    places = iter((f"{upstream.url}/elsewhere", "//evil.example/v1", f"{upstream.url}/else", "/x"))

    async def elsewhere(_: web.Request) -> web.Response:
        return web.Response(status=307, headers={"Location": next(places)})

    await taken(proxy, key)
    upstream.behave = upstream.behave_otherwise = elsewhere
    for path in ("/v1/chat/completions", "/v1/chat/completions", "/v1/embeddings"):
        reply = await proxy.ask("POST", path, bearer(key), **CALL)
        assert (reply.status, reply.headers["x-pawl-fault"]) == (502, "upstream")
        assert reply.json["error"]["code"] == "upstream_redirects"
        assert "Location" not in reply.headers
    # One that stays at the proxy is passed on.
    reply = await proxy.ask("POST", "/v1/embeddings", bearer(key), **CALL)
    assert (reply.status, reply.headers["Location"]) == (307, "/x")
    calls = [call for episode in await proxy.episodes(2) for call in episode.calls]
    assert {(call.status, call.http_status) for call in calls} == {("upstream_error", 307)}
