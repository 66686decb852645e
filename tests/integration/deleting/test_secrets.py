"""Secrets in headers, query strings and settings: in no file, table, log line, metric or export."""

import io
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from sqlalchemy.ext.asyncio import AsyncEngine

from benchmarks.stack import free_port
from pawl.export import export
from pawl.stack.process import Process
from store.selecting import Selection
from store.version_states import ensure_base
from tests.integration.conftest import Proxy, settings_for
from tests.support.ledger.deleting import places_with
from tests.support.proxy.kept_files import bytes_now, paths_of
from tests.support.servers.fake_upstream import FakeUpstream
from tests.support.waiting import eventually

CANARY = "canary9f1c"
HEADERS = {
    "Authorization": f"Bearer {CANARY}-a",
    "x-api-key": f"{CANARY}-b",
    "Cookie": f"session={CANARY}-c",
    "Proxy-Authorization": f"Basic {CANARY}-d",
    "api-key": f"{CANARY}-e",
    "x-goog-api-key": f"{CANARY}-f",
    # What is read of these is not kept where it cannot be read.
    "x-pawl-tool-status": "not a ( list",
}
QUERY = f"?api_key={CANARY}-g&key={CANARY}-h"
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "q"}]}
REQUESTS: Mapping[str, Any] = {
    "/episode/e1/v1/chat/completions": CHAT,
    "/episode/e2/v1/chat/completions": CHAT | {"stream": True},
    "/v1/completions": {"model": "m", "prompt": "q"},
    "/v1/responses": {"model": "m", "input": "q"},
    "/v1/messages": CHAT | {"max_tokens": 5},
    "/v1/chat/completions": {"model": 5},
    "/v1/embeddings": {"model": "m", "input": "q"},
    "/v1/load_lora_adapter": {},
    "/feedback": {"episode": "e1", "value": 1.0},
    "/feedback/nowhere": {},
}


@asynccontextmanager
async def proxy_process(
    url: str, upstream_url: str, folder: Path
) -> AsyncIterator[tuple[Proxy, Path]]:
    """Run `pawl proxy`, and yield a client of it with the file of its log."""
    settings = settings_for(url, upstream_url, folder)
    environment = os.environ | {
        "DATABASE_URL": url,
        "PAWL_UPSTREAM_URL": upstream_url,
        "PAWL_LISTEN": settings.listen,
        "PAWL_ADMIN_LISTEN": settings.admin_listen,
        "PAWL_SPOOL_DIR": str(settings.spool_dir),
    }
    command = [sys.executable, "-m", "pawl.cli", "proxy"]
    process = Process("proxy", command, environment, folder / "logs")
    await process.start()
    try:
        async with aiohttp.ClientSession() as session:
            proxy = Proxy(settings, None, session)  # type: ignore[arg-type]

            async def is_ready() -> bool:
                try:
                    async with session.get(f"{proxy.admin}/readyz") as reply:
                        return reply.status == 200
                except aiohttp.ClientError:
                    return False

            await eventually(is_ready)
            yield proxy, process.log_file
    finally:
        await process.stop()


def files_with(folder: Path) -> list[str]:
    """Every file below a folder that holds the canary, or has it in its name."""
    return [
        str(path)
        for path in paths_of(folder)
        if CANARY in str(path) or CANARY.encode() in bytes_now(path)
    ]


async def ask(proxy: Proxy, path: str, body: Any) -> str:
    """Send one request with all secrets, and return what came, headers included."""
    url = f"{proxy.url}{path}{QUERY}"
    async with proxy.session.post(url, json=body, headers=HEADERS) as reply:
        return f"{reply.headers}{await reply.text()}"


async def with_a_cookie(_: web.Request) -> web.Response:
    return web.json_response(
        {"error": {"message": "no"}}, status=401, headers={"Set-Cookie": f"s={CANARY}-i"}
    )


async def test_secrets_of_a_request_are_in_no_reply_file_table_metric_or_export(
    engine: AsyncEngine, database_url: str, upstream: FakeUpstream, tmp_path: Path
) -> None:
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
    async with proxy_process(database_url, upstream.url, tmp_path) as (proxy, log_file):
        for path, body in REQUESTS.items():
            assert CANARY not in await ask(proxy, path, body)
        upstream.behave = with_a_cookie
        await ask(proxy, "/episode/e3/v1/chat/completions", CHAT)
        upstream.behave = None
        # While the records are still in the spool, and what was drained of it.
        assert files_with(tmp_path / "spool") == []

        async def stored() -> bool:
            counters = await proxy.counters()
            return counters["pawl_records_stored_total"] >= 8

        await eventually(stored)
        async with proxy.session.get(f"{proxy.admin}/metrics") as reply:
            assert CANARY not in await reply.text()
    assert f"Bearer {CANARY}-a" in {one.get("Authorization") for one in upstream.headers}
    assert log_file.exists()
    assert files_with(tmp_path) == []
    assert await places_with(engine, CANARY) == []
    out = io.BytesIO()
    await export(engine, Selection(), out)
    assert b"e1" in out.getvalue()
    assert CANARY.encode() not in out.getvalue()


async def test_credentials_in_an_upstreams_url_are_not_shown(
    database_url: str, tmp_path: Path
) -> None:
    url = f"http://user:{CANARY}-j@127.0.0.1:{free_port()}/v1"
    async with proxy_process(database_url, url, tmp_path) as (proxy, log_file):
        told = await ask(proxy, "/v1/chat/completions", CHAT)
        assert "PAWL_UPSTREAM_URL" in told
        assert "127.0.0.1" not in told
        assert CANARY not in told
    assert '"replica":"http://127.0.0.1' in log_file.read_text()
    assert files_with(tmp_path) == []
