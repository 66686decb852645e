"""Requests that are let through untouched and unrecorded, streamed both ways, any size."""

import aiohttp
from aiohttp import web

from proxy.errors import ProxyError, error_body
from proxy.metrics import FORWARDED
from proxy.routes import Route
from proxy.upstream import Upstream, reply_headers, request_headers


async def forward(request: web.BaseRequest, route: Route, upstream: Upstream) -> web.StreamResponse:
    """Pass a request on and its reply back, byte for byte."""
    body = request.content if request.body_exists else None
    headers = request_headers(request.headers)
    if body is not None and request.content_length is not None:
        headers["Content-Length"] = str(request.content_length)
    query = request.raw_path.partition("?")[2]
    url = upstream.url(route.path, query)
    try:
        opened = await upstream.open(request.method, url, headers, body)
    except ProxyError as error:
        FORWARDED.labels(_label(route), str(error.status)).inc()
        return web.Response(
            status=error.status,
            body=error_body(error),
            content_type="application/json",
            headers={"x-pawl-fault": error.fault},
        )
    async with opened as reply:
        FORWARDED.labels(_label(route), str(reply.status)).inc()
        response = web.StreamResponse(
            status=reply.status,
            reason=reply.reason,
            headers=reply_headers(reply.headers, keep_length=True),
        )
        await response.prepare(request)
        try:
            async for chunk in reply.content.iter_any():
                await response.write(chunk)
        except aiohttp.ClientError:
            if request.transport is not None:
                request.transport.abort()
            return response
        await response.write_eof()
        return response


def _label(route: Route) -> str:
    return "/v1/models" if route.path.startswith("/v1/models/") else route.path
