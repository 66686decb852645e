"""Requests to a server: with a body at hand, without one, or with one that comes in pieces."""

import asyncio

import structlog

from proxy.http import wire
from proxy.http.client import Pool, Reply, UpstreamConnection
from proxy.http.flow import Inflow
from proxy.http.wire import Headers

log = structlog.get_logger()


async def ask_whole(pool: Pool, method: str, target: str, headers: Headers, body: bytes) -> Reply:
    """Send a request with a body that is at hand; returns once the reply's head is there.

    Raises:
        NotSent: there was no connection.
        NoReply: it broke, or was silent for too long, before the reply.
    """
    connection = await pool.connection()
    head = wire.request_head(method, target, pool.authority, headers, len(body))
    return await _answer(connection, connection.ask(head + body, to_head=method == "HEAD"))


async def ask_bodyless(pool: Pool, method: str, target: str, headers: Headers) -> Reply:
    """Send a request without a body; see `ask_whole`."""
    connection = await pool.connection()
    head = wire.bodyless_head(method, target, pool.authority, headers)
    return await _answer(connection, connection.ask(head, to_head=method == "HEAD"))


async def ask_streaming(
    pool: Pool, method: str, target: str, headers: Headers, length: int | None, body: Inflow
) -> Reply:
    """Send a request whose body comes in pieces; see `ask_whole`.

    A server may answer before it has all of it: the rest is sent beside its answer, for as
    long as that lasts.
    """
    connection = await pool.connection()
    head = wire.request_head(method, target, pool.authority, headers, length)
    connection.sending = True
    answer = connection.ask(head, to_head=method == "HEAD")
    pushing = asyncio.create_task(_push(connection, body, chunked=length is None))
    connection.pushing = pushing
    return await _answer(connection, answer)


async def _push(connection: UpstreamConnection, body: Inflow, *, chunked: bool) -> None:
    try:
        while data := await body.more():
            await connection.push(wire.chunk(data) if chunked else data)
    except ConnectionError:
        # The client left in the middle of its request: half of it is no request.
        connection.abort()
        return
    except Exception:
        log.exception("request_not_pushed")
        connection.abort()
        return
    if chunked:
        await connection.push(wire.LAST_CHUNK)
    connection.sending = False


async def _answer(connection: UpstreamConnection, answer: "asyncio.Future[Reply]") -> Reply:
    try:
        return await answer
    except asyncio.CancelledError:
        # Nobody wants the reply any more: the server must not go on making it.
        connection.abort()
        raise
