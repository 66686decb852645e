"""Sends requests to a server: with a whole body, without one, or with one that comes in pieces."""

import asyncio

import structlog

from proxy.http import wire
from proxy.http.client import Pool, Reply, UpstreamConnection
from proxy.http.flow import BodyStream
from proxy.http.wire import Headers

log = structlog.get_logger()


async def ask_whole(pool: Pool, method: str, target: str, headers: Headers, body: bytes) -> Reply:
    """Send a request with its whole body, and return the reply once its head has come.

    Raises:
        NotSent: no connection could be made.
        NoReply: the connection broke, or was silent for too long, before the reply.
    """
    connection = await pool.connection()
    head = wire.request_head(method, target, pool.authority, headers, len(body))
    return await _answer(connection, connection.ask(head + body, to_head=method == "HEAD"))


async def ask_bodyless(pool: Pool, method: str, target: str, headers: Headers) -> Reply:
    """Send a request without a body; it raises what `ask_whole` raises."""
    connection = await pool.connection()
    head = wire.bodyless_head(method, target, pool.authority, headers)
    return await _answer(connection, connection.ask(head, to_head=method == "HEAD"))


async def ask_streaming(
    pool: Pool, method: str, target: str, headers: Headers, length: int | None, body: BodyStream
) -> Reply:
    """Send a request whose body comes in pieces; it raises what `ask_whole` raises.

    A server may answer before it has the whole body: the rest is sent while its answer is received,
    for as long as that lasts.
    """
    connection = await pool.connection()
    head = wire.request_head(method, target, pool.authority, headers, length)
    connection.sending = True
    answer = connection.ask(head, to_head=method == "HEAD")
    pushing = asyncio.create_task(_push(connection, body, chunked=length is None))
    connection.pushing = pushing
    return await _answer(connection, answer)


async def _push(connection: UpstreamConnection, body: BodyStream, *, chunked: bool) -> None:
    try:
        while data := await body.more():
            await connection.push(wire.chunk(data) if chunked else data)
    except ConnectionError:
        # The client left in the middle of its request, and half a request must not be answered.
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
        # Nobody reads the reply any more, so the server must stop generating it.
        connection.abort()
        raise
