"""Send requests to a server: with a whole body, without one, or with one that comes in pieces."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog

from proxy.http import wire
from proxy.http.client import Pool, Reply, UpstreamConnection
from proxy.http.flow import BodyStream
from proxy.http.wire import Headers

log = structlog.get_logger()


def ask_whole(
    pool: Pool, method: str, target: str, headers: Headers, body: bytes
) -> Coroutine[Any, Any, Reply]:
    """Send a request with its whole body, and return the reply once its head has come.

    Raises:
        NotSent: no connection could be made.
        NoReply: the connection broke, or was silent for too long, before the reply.
    """
    head = wire.request_head(method, target, pool.authority, headers, len(body))
    return _ask(pool, method, head + body)


def ask_bodyless(
    pool: Pool, method: str, target: str, headers: Headers
) -> Coroutine[Any, Any, Reply]:
    """Send a request without a body; it raises what `ask_whole` raises."""
    return _ask(pool, method, wire.bodyless_head(method, target, pool.authority, headers))


def ask_streaming(
    pool: Pool, method: str, target: str, headers: Headers, length: int | None, body: BodyStream
) -> Coroutine[Any, Any, Reply]:
    """Send a request whose body comes in pieces; it raises what `ask_whole` raises.

    A server may answer before it has the whole body: the rest is sent while its answer is received,
    for as long as that lasts.
    """
    head = wire.request_head(method, target, pool.authority, headers, length)
    return _ask(pool, method, head, body, chunked=length is None)


async def _ask(
    pool: Pool, method: str, data: bytes, body: BodyStream | None = None, *, chunked: bool = False
) -> Reply:
    """Send `data`, and then the pieces of `body` as they come; return the reply."""
    connection = pool.kept() or await pool.connection()
    connection.sending = body is not None
    answer = connection.ask(data, to_head=method == "HEAD")
    if body is not None:
        connection.pushing = asyncio.create_task(_push(connection, body, chunked=chunked))
    try:
        return await answer
    except asyncio.CancelledError:
        # Nobody reads the reply any more, so the server must stop generating it.
        connection.abort()
        raise


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
