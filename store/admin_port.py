"""Listen on an admin port, which aiohttp serves: no client fills the log, no web page asks."""

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
from store.settings import address

# What aiohttp raises for a head or body that it cannot read, and for a client that went away
# before its answer. The answer to the former is 400, wherever there is one to be sent yet.
_CLIENTS_FAULT: Final = (HttpProcessingError, web.RequestPayloadError, ConnectionError)


async def listen_on(
    app: web.Application, listen: str, setting: str, hosts: tuple[str, ...] | None
) -> web.AppRunner:
    """Serve an application on the address `listen` of a setting, until the runner's `cleanup`.

    Requests of other pages than those that `hosts` name are refused; None: `app` looks itself.

    Raises:
        NotListening: the port is taken, or the machine has no such address.
    """
    server_logger.addFilter(is_a_failure)
    if hosts is not None:
        app.middlewares.append(_without_foreign_pages(hosts))
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    host, port = address(listen)
    try:
        with listening_on(listen, setting):
            await web.TCPSite(runner, host, port).start()
    except BaseException:
        await runner.cleanup()
        raise
    return runner


def _without_foreign_pages(hosts: tuple[str, ...]) -> Middleware:
    @web.middleware
    async def refuse(request: web.Request, handler: Handler) -> web.StreamResponse:
        why = why_foreign(request.method, request.raw_headers, hosts)
        if why is None:
            return await handler(request)
        error = {"message": why, "type": "invalid_request_error", "code": "foreign_page"}
        return web.json_response({"error": error}, status=403)

    return refuse


@contextmanager
def listening_on(listen: str, setting: str) -> Iterator[None]:
    """Raise NotListening for an error of listening, within the block, on a setting's address."""
    try:
        yield
    # The second is of a host's name that cannot be asked for; the resolver's numbers are negative.
    except (OSError, UnicodeError) as error:
        code = getattr(error, "errno", None) or 0
        why = os.strerror(code) if code > 0 else "no such host is known here"
        raise NotListening(
            f"{setting}={listen} cannot be listened on: {why}: stop the program that listens there,"
            " or set another HOST:PORT, such as 127.0.0.1:8100"
        ) from error


def is_a_failure(record: LogRecord) -> bool:
    """Return whether a record of aiohttp's is of more than a request that it could not read.

    Whoever sends such requests must not fill the log with tracebacks.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, _CLIENTS_FAULT)
