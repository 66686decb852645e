"""Requests that are let through untouched and unrecorded, streamed both ways, any size.

With several upstreams the one that a request is for must be known first: its body is read,
and the lists of models are joined.
"""

from typing import Final

from proxy.dialects.base import read_request
from proxy.errors import NotAllowed, ProxyError
from proxy.http.client import Torn
from proxy.http.exchange import Exchange
from proxy.http.wire import JSON, Headers, for_client, for_upstream
from proxy.intake.intake import Intake
from proxy.metrics import FORWARDED
from proxy.refusal import refuse
from proxy.routes import Route
from proxy.upstreams.members import Upstreams
from proxy.upstreams.model_server import Reply
from proxy.upstreams.upstream import Upstream

MODELS: Final = "/v1/models"


async def forward(exchange: Exchange, route: Route, upstreams: Upstreams, intake: Intake) -> None:
    """Pass a request on to the upstream it is for, and its reply back, byte for byte."""
    try:
        if route.administers and upstreams.keyed:
            raise NotAllowed(
                f"{exchange.method} {route.path} manages the account at the provider, and this "
                "proxy sends requests with its own key: do that without the proxy",
                code="unknown_url",
            )
        if upstreams.only is not None:
            reply = await _streamed(exchange, route, upstreams.only)
        elif (exchange.method, route.path) == ("GET", MODELS):
            await _models(exchange, upstreams)
            FORWARDED.labels(MODELS, "200").inc()
            return
        else:
            reply = await _routed(exchange, route, upstreams, intake)
    except ProxyError as error:
        FORWARDED.labels(route.label, str(error.status)).inc()
        refuse(exchange, error)
        return
    FORWARDED.labels(route.label, str(reply.status)).inc()
    try:
        await _pass_back(exchange, reply)
    finally:
        reply.close()


async def _streamed(exchange: Exchange, route: Route, upstream: Upstream) -> Reply:
    length, chunked = exchange.length, exchange.chunked
    body = exchange.body if chunked or length is not None else None
    if body is not None:
        exchange.ask_on()
    headers = for_upstream(exchange.headers, plain=False)
    return await upstream.pass_on(
        exchange.method, _target(exchange, route), headers, None if chunked else length, body
    )


async def _routed(exchange: Exchange, route: Route, upstreams: Upstreams, intake: Intake) -> Reply:
    headers, target = for_upstream(exchange.headers, plain=False), _target(exchange, route)
    if exchange.method == "GET":
        model = route.path.removeprefix(MODELS + "/")
        return await upstreams.for_model(model).fetch(target, headers)
    with intake.budget.claim() as claim:
        # With several upstreams a body must be read to know whose it is.
        body, long = await intake.read(exchange, claim)
        asked = await intake.beside(read_request, body) if long else read_request(body)
        server = upstreams.for_model(asked.model)
        return await server.ask(exchange.method, target, headers, body)


async def _models(exchange: Exchange, upstreams: Upstreams) -> None:
    headers = for_upstream(exchange.headers, plain=True)
    body, missing = await upstreams.models(headers)
    said: Headers = [JSON]
    if missing:
        text = f"no list of models from upstream {', '.join(missing)}"
        said.append((b"x-pawl-warning", text.encode()))
    exchange.reply(200, b"", said, body)


def _target(exchange: Exchange, route: Route) -> str:
    query = exchange.target.partition("?")[2]
    return f"{route.path}?{query}" if query else route.path


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
