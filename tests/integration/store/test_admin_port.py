"""The admin port answers strangers without logging, logs our failures, and no other site asks."""

import asyncio
import logging
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from aiohttp import web

from benchmarks.stack import free_port
from store.admin_port import serve_app
from tests.support.servers.raw_upstream import raw_ask

HEAD = b"GET %b HTTP/1.1\r\nHost: a\r\n%b\r\n"
RESETS = struct.pack("ii", 1, 0)


async def healthz(_: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def broken(_: web.Request) -> web.Response:
    raise KeyError("ours")


@asynccontextmanager
async def listening() -> AsyncIterator[int]:
    """Yield the port of an application with one good and one broken page."""
    app = web.Application()
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/broken", broken)
    port = free_port()
    runner = await serve_app(app, f"127.0.0.1:{port}", "PAWL_ADMIN_LISTEN", ("metrics.example",))
    try:
        yield port
    finally:
        await runner.cleanup()


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


async def test_request_body_that_cannot_be_read_after_the_answer_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    headers = b"Content-Encoding: gzip\r\nContent-Length: 20\r\n"
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD % (b"/healthz", headers))
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        # The server reads on, to take the next request of the connection.
        writer.write(b"not compressed at all")
        await reader.read()
        writer.close()
    assert failures(caplog) == []


async def test_client_gone_before_100_continue_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with listening() as port:
        for _ in range(50):
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(HEAD % (b"/healthz", b"Expect: 100-continue\r\n"))
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESETS)
        with suppress(ConnectionError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HEAD % (b"/healthz", b"Connection: close\r\n"))
            await reader.read()
            writer.close()
    assert failures(caplog) == []


async def test_internal_error_of_the_admin_port_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD % (b"/broken", b"Connection: close\r\n"))
        assert await reader.readline() == b"HTTP/1.1 500 Internal Server Error\r\n"
        await reader.read()
        writer.close()
    assert len(failures(caplog)) == 1


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: \xb2\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: a\r\nX-Pawl: a\rb\r\n\r\n",
        b'{"event":"call","level":"info"}\n\n',
    ],
)
async def test_malformed_request_to_the_admin_port_is_400_and_not_logged(
    request_bytes: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with listening() as port:
        answer = await raw_ask(port, request_bytes)
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 "))
    assert caplog.records == []


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (b"Host: 127.0.0.1:8102", b"200"),
        (b"Host: trainer:8102", b"200"),
        (b"Host: metrics.example:8102", b"200"),
        (b"Host: evil.example", b"403"),
        (b"Host: a\r\nOrigin: null", b"403"),
        (b"Host: a\r\nSec-Fetch-Site: cross-site", b"403"),
    ],
)
async def test_admin_port_without_keys_refuses_pages_of_other_sites(
    headers: bytes, status: bytes
) -> None:
    async with listening() as port:
        head = b"GET /healthz HTTP/1.1\r\nConnection: close\r\n%b\r\n\r\n"
        answer = await raw_ask(port, head % headers)
    assert answer.split()[1] == status
    assert status == b"200" or b"PAWL_ALLOWED_HOSTS" in answer
