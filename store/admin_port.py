"""Serve admin ports with aiohttp: refuse other sites' web pages, and do not log client errors."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from logging import LogRecord
from typing import Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.log import server_logger
from aiohttp.typedefs import Handler, Middleware

from store.browsers import why_foreign
from store.errors import NotListening
from store.settings import parse_address

# aiohttp's errors for an unreadable head or body, which it answers with 400 where it still can, and
# for a client that disconnected before its answer.
_CLIENTS_FAULT: Final = (HttpProcessingError, web.RequestPayloadError, ConnectionError)


async def serve_app(
    app: web.Application, listen: str, setting: str, hosts: tuple[str, ...] | None
) -> web.AppRunner:
    """Serve `app` on the address `listen` until the returned runner's `cleanup`.

    `setting` is the name of the setting that has the address, for error messages. Requests from web
    pages of hosts other than `hosts` are refused; if `hosts` is None, `app` itself must check them.

    Raises:
        NotListening: the port is taken, or the machine has no such address.
    """
    server_logger.addFilter(is_server_failure)
    if hosts is not None:
        app.middlewares.append(_refuse_foreign_pages(hosts))
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    host, port = parse_address(listen)
    try:
        with explain_listen_failure(listen, setting):
            await web.TCPSite(runner, host, port).start()
    except BaseException:
        await runner.cleanup()
        raise
    return runner


def _refuse_foreign_pages(hosts: tuple[str, ...]) -> Middleware:
    @web.middleware
    async def refuse(request: web.Request, handler: Handler) -> web.StreamResponse:
        why = why_foreign(request.method, request.raw_headers, hosts)
        if why is None:
            return await handler(request)
        error = {"message": why, "type": "invalid_request_error", "code": "foreign_page"}
        return web.json_response({"error": error}, status=403)

    return refuse


@contextmanager
def explain_listen_failure(listen: str, setting: str) -> Iterator[None]:
    """Raise NotListening if the block cannot listen on `listen`, the value of setting `setting`."""
    try:
        yield
    # UnicodeError: the host name cannot be encoded. The resolver's error numbers are negative.
    except (OSError, UnicodeError) as error:
        code = getattr(error, "errno", None) or 0
        why = os.strerror(code) if code > 0 else "no such host is known here"
        raise NotListening(
            f"{setting}={listen} cannot be listened on: {why}: stop the program that listens there,"
            " or set another HOST:PORT, such as 127.0.0.1:8100"
        ) from error


def is_server_failure(record: LogRecord) -> bool:
    """Return False if a log record of aiohttp's reports a client's error, else True (log filter).

    Clients must not be able to fill the log with tracebacks.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, _CLIENTS_FAULT)
