"""Requests that are let through untouched and unrecorded, streamed both ways, any size."""

from proxy.errors import ProxyError
from proxy.http.client import Reply, Torn
from proxy.http.server import Exchange
from proxy.http.wire import for_client, for_upstream
from proxy.metrics import FORWARDED
from proxy.refusal import refuse
from proxy.routes import Route
from proxy.upstream import Upstream


async def forward(exchange: Exchange, route: Route, upstream: Upstream) -> None:
    """Pass a request on and its reply back, byte for byte."""
    length, chunked = exchange.length, exchange.chunked
    body = exchange.body if chunked or length is not None else None
    if body is not None:
        exchange.ask_on()
    query = exchange.target.partition("?")[2]
    target = f"{route.path}?{query}" if query else route.path
    headers = for_upstream(exchange.headers, plain=False)
    try:
        reply = await upstream.pass_on(
            exchange.method, target, headers, None if chunked else length, body
        )
    except ProxyError as error:
        FORWARDED.labels(route.label, str(error.status)).inc()
        refuse(exchange, error)
        return
    FORWARDED.labels(route.label, str(reply.status)).inc()
    try:
        await _pass_back(exchange, reply)
    finally:
        reply.close()


async def _pass_back(exchange: Exchange, reply: Reply) -> None:
    length = reply.header(b"content-length")
    headers = for_client(reply.headers)
    if length is None:
        exchange.begin(reply.status, reply.reason, headers)
    else:
        exchange.begin_sized(reply.status, reply.reason, headers, length)
    try:
        async for piece in reply.pieces():
            exchange.write(piece)
            await exchange.drained()
    except Torn:
        exchange.tear()
        return
    exchange.end()
