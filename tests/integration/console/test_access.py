"""Who may see the console: keys, other sites, other names, prefixes; and an absent database."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine
from starlette.requests import Request
from starlette.types import Message

from console.app import MOST_AT_ONCE, app_of, failure_page
from console.pages import reading
from pawl.doctor.checks import Finding
from pawl.settings import ConsoleSettings
from proxy.error_replies import RefusalLog
from store.embedded import EmbeddedPostgres
from store.grants import Scope
from store.keys import create_key, revoke_key
from tests.integration.console.conftest import OpenConsole, Pages


async def key_of(engine: AsyncEngine, name: str, *scopes: Scope, tenant: str = "default") -> str:
    async with engine.begin() as connection:
        return (await create_key(connection, name, scopes, tenant=tenant)).key


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("header", ["X-Forwarded-For", "X-Forwarded-Proto", "Via", "Forwarded"])
async def test_console_without_keys_is_open_to_this_machine_alone(
    console: Pages, header: str
) -> None:
    assert (await console.get("/")).status == 200
    relayed = await console.get("/", {header: "203.0.113.9"})
    assert relayed.status == 403
    assert "pawl keys create" in relayed.body.decode()


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:8105", "203.0.113.9", "[2001:db8::1]", ""]
)
async def test_console_without_keys_refuses_a_foreign_host_header(
    console: Pages, host: str
) -> None:
    assert (await console.get("/", {"Host": host})).status == 403
    for own in ("localhost:8105", "127.0.0.1", "[::1]:80", "pawl-console:8105"):
        assert (await console.get("/", {"Host": own})).status == 200


async def test_api_key_named_local_counts_as_logged_in(console: Pages, engine: AsyncEngine) -> None:
    shown = await console.get("/", bearer(await key_of(engine, "local", "read")))
    assert "Log out" in shown.body.decode()


async def test_console_closes_a_connection_that_sends_no_whole_request(
    open_console: OpenConsole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("console.app.REQUEST_S", 0.2)
    head = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
    async with open_console() as console:
        host, port = console.address.split("/")[2].split(":")
        for sent in (b"", head, head + b"\r\n" + head, head + b"Content-Length: 9\r\n\r\n"):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            await asyncio.wait_for(reader.read(), 5)
            assert reader.at_eof()
            writer.close()


async def test_silent_connections_do_not_block_other_requests(console: Pages) -> None:
    host, port = console.address.split("/")[2].split(":")
    waiting = [await asyncio.open_connection(host, int(port)) for _ in range(MOST_AT_ONCE + 50)]
    for _, writer in waiting[::2]:
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: ")
    assert [(await console.get(path)).status for path in ("/healthz", "/")] == [200, 200]
    for _, writer in waiting:
        writer.close()


async def test_console_neither_answers_nor_logs_a_disconnect_during_a_form_upload(
    database_url: str,
) -> None:
    received: Iterator[Message] = iter(
        [
            {"type": "http.request", "body": b"key=", "more_body": True},
            {"type": "http.disconnect"},
        ]
    )
    sent: list[Message] = []

    async def receive() -> Message:
        return next(received)

    async def send(message: Message) -> None:
        sent.append(message)

    app = app_of(ConsoleSettings(), database_url)
    scope = {"type": "http", "method": "POST", "path": "/login", "headers": [], "query_string": b""}
    with structlog.testing.capture_logs() as logged:
        await app(scope, receive, send)
    assert (sent, logged) == ([], [])
    await app.state.console.engine.dispose()


@pytest.mark.parametrize("path", ["/versions/m/9999999999", "/versions/m%00/1"])
async def test_page_address_with_a_value_that_the_database_cannot_hold_is_400(
    console: Pages, path: str
) -> None:
    assert (await console.get(path)).status == 400


async def test_console_requires_a_key_after_the_first_key_is_made(
    console: Pages, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await key_of(engine, "anna", "read", "train", "admin")
    without = await console.get("/?a=1")
    assert without.status == 401
    assert 'name="next" value="/?a=1"' in without.body.decode()
    assert "wrong or was revoked" not in without.body.decode()
    wrong = await console.get("/", bearer(key[:-1] + "_"))
    assert (wrong.status, "wrong or was revoked" in wrong.body.decode()) == (401, True)
    assert (await console.get("/", bearer(key))).status == 200
    monkeypatch.setattr("console.app.REFUSALS", RefusalLog())
    with structlog.testing.capture_logs() as logged:
        unscoped = await console.get("/", bearer(await key_of(engine, "agent", "infer")))
        reader = bearer(await key_of(engine, "reader", "read"))
        assert (await console.get("/versions/m/1/promote", reader)).status == 403
    assert (unscoped.status, "needs read" in unscoped.body.decode()) == (403, True)
    assert [(line["event"], line["path"], line["key"]) for line in logged] == [
        ("refused", "/", "agent"),
        ("refused", "/versions/m/1/promote", "reader"),
    ]
    async with engine.begin() as connection:
        await revoke_key(connection, "anna")
    assert (await console.get("/", bearer(key))).status == 401


async def test_browser_logs_in_and_out(console: Pages, engine: AsyncEngine) -> None:
    key = await key_of(engine, "anna", "read")
    entered = await console.ask("POST", "/login", key=f" {key} ", next="/?a=1")
    assert (entered.status, entered.headers["Location"]) == (303, "/?a=1")
    cookie = entered.headers["Set-Cookie"]
    assert re.search(r"HttpOnly; Max-Age=\d+; Path=/; SameSite=lax", cookie)
    assert "Secure" not in cookie
    shown = (await console.get("/")).body.decode()
    assert "anna" in shown
    assert key not in shown
    # A browser that sends the password of a proxy in front of it keeps its cookie.
    assert (await console.get("/", {"Authorization": "Basic YTpi"})).status == 200
    await console.ask("POST", "/logout")
    assert (await console.get("/")).status == 401


async def test_login_cookie_is_secure_over_https(console: Pages) -> None:
    origin = "https://" + console.address.split("/")[2]
    entered = await console.ask("POST", "/login", {"Origin": origin}, key="k")
    assert "Secure" in entered.headers["Set-Cookie"]


@pytest.mark.parametrize("to", ["https://evil.example/", "//evil.example", "/\\evil.example", "x"])
async def test_login_leads_to_no_other_site(console: Pages, to: str) -> None:
    entered = await console.ask("POST", "/login", key="k", next=to)
    assert entered.headers["Location"] == "/"


async def test_cross_site_link_opens_a_page_and_cannot_post(
    console: Pages, engine: AsyncEngine
) -> None:
    await console.ask("POST", "/login", key=await key_of(engine, "anna", "read"))
    followed = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "document"}
    assert (await console.get("/", followed)).status == 200
    sent = await console.ask("POST", "/review", followed)
    assert (sent.status, "another site" in sent.body.decode()) == (403, True)


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_other_site_cannot_embed_the_console(console: Pages, site: str) -> None:
    for kind, status in (("image", 403), ("iframe", 403), ("empty", 403), ("document", 200)):
        headers = {"Sec-Fetch-Site": site, "Sec-Fetch-Dest": kind}
        assert (await console.get("/", headers)).status == status


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
async def test_form_posted_from_another_site_is_refused(
    console: Pages, headers: dict[str, str]
) -> None:
    refused = await console.ask("POST", "/login", headers, key="k")
    assert refused.status == 403
    assert "Set-Cookie" not in refused.headers


async def test_every_answer_forbids_foreign_and_inline_scripts(
    console: Pages, engine: AsyncEngine
) -> None:
    for path, status in (("/", 200), ("/none", 404), ("/static/console.css", 200)):
        reply = await console.get(path)
        assert reply.status == status
        assert "script-src 'self';" in reply.headers["Content-Security-Policy"]
        assert "unsafe" not in reply.headers["Content-Security-Policy"]
        assert reply.headers["X-Content-Type-Options"] == "nosniff"
        text = reply.body.decode()
        assert not re.search(r"<script(?![^>]*\bsrc=)|\bstyle=|\bon\w+=|<style|javascript:", text)
    assert (await console.ask("DELETE", "/")).status == 405


@pytest.mark.parametrize("seen", ["/pawl", ""])
async def test_console_answers_behind_a_prefix_that_a_proxy_keeps_or_removes(
    open_console: OpenConsole, seen: str
) -> None:
    async with open_console(console_prefix="/pawl/") as console:
        console.address = console.address.replace("/pawl/", seen + "/")
        shown = (await console.get("/")).body.decode()
        assert 'href="/pawl/"' in shown
        [style] = re.findall(r'href="/pawl(/static/console\.css\?v=\w+)"', shown)
        assert (await console.get(style)).status == 200
        assert (await console.get("/pawlx")).status == 404
        entered = await console.ask("POST", "/login", key="k")
        assert entered.headers["Location"] == "/pawl/"
        assert "Path=/pawl;" in entered.headers["Set-Cookie"]


@pytest.mark.usefixtures("own_cluster")
async def test_console_shows_a_page_while_the_database_is_away(
    open_console: OpenConsole, tmp_path: Path
) -> None:
    postgres = EmbeddedPostgres(tmp_path)
    async with open_console(postgres.ensure_running()) as console:
        try:
            assert (await console.get("/")).status == 200
            postgres.stop()
            for _ in range(2):
                away = await console.get("/")
                assert (away.status, "The database is away" in away.body.decode()) == (503, True)
            assert (await console.get("/healthz")).status == 200
            assert (await console.get("/static/console.css")).status == 200
            postgres.ensure_running()
            assert (await console.get("/")).status == 200
        finally:
            postgres.stop()


@pytest.mark.parametrize(
    ("error", "title"),
    [
        (PoolTimeout("QueuePool limit of size 4"), "Too many viewers at once"),
        (ConnectionRefusedError("cannot connect to 203.0.113.9:5432"), "The database is away"),
    ],
)
async def test_failure_page_names_no_server_address(
    database_url: str, error: Exception, title: str
) -> None:
    app = app_of(ConsoleSettings(), database_url)
    shown = failure_page(Request({"type": "http", "app": app, "headers": [], "path": "/"}), error)
    assert title in bytes(shown.body).decode()
    assert "203.0.113.9" not in bytes(shown.body).decode()
    await app.state.console.engine.dispose()


async def test_console_without_tables_advises_pawl_migrate(
    open_console: OpenConsole, empty_database_url: str
) -> None:
    async with open_console(empty_database_url) as console:
        shown = await console.get("/")
        assert shown.status == 503
        assert "pawl migrate" in shown.body.decode()


async def test_pages_read_in_transactions_that_cannot_write(database_url: str) -> None:
    app = app_of(ConsoleSettings(), database_url)
    request = Request({"type": "http", "app": app, "headers": []})
    with pytest.raises(DBAPIError, match="read-only transaction"):
        async with reading(request) as connection:
            await connection.execute(text("DELETE FROM api_keys"))
    await app.state.console.engine.dispose()


async def test_doctor_runs_once_for_several_page_views(
    console: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    async def diagnose(*given: object, **_: object) -> list[Finding]:
        asked.append(given)
        return []

    monkeypatch.setattr("console.overview.diagnose", diagnose)
    for _ in range(3):
        assert (await console.get("/overview/doctor")).status == 200
    assert len(asked) == 1
