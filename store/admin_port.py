"""Listen on an admin port, which aiohttp serves, without letting its clients fill the log."""

from logging import LogRecord
from typing import Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.log import server_logger

from store.settings import address

# What aiohttp raises for a head or body that it cannot read, and for a client that went away
# before its answer. The answer to the former is 400, wherever there is one to be sent yet.
_CLIENTS_FAULT: Final = (HttpProcessingError, web.RequestPayloadError, ConnectionError)


async def listen_on(app: web.Application, listen: str) -> web.AppRunner:
    """Serve an application on the address `listen`, until the runner's `cleanup`.

    Raises:
        OSError: the port is taken.
    """
    server_logger.addFilter(is_a_failure)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    host, port = address(listen)
    try:
        await web.TCPSite(runner, host, port).start()
    except BaseException:
        await runner.cleanup()
        raise
    return runner


def is_a_failure(record: LogRecord) -> bool:
    """Return whether a record of aiohttp's is of more than a request that it could not read.

    Whoever sends such requests must not fill the log with tracebacks.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, _CLIENTS_FAULT)
