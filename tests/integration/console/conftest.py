"""A console in this process, and what a browser or a script sees of it."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import aiohttp
import pytest

from console.app import serving
from pawl.settings import ConsoleSettings
from tests.integration.conftest import Reply


class Pages:
    """A client that follows no redirect and keeps cookies, as a browser without its pages."""

    def __init__(self, address: str, session: aiohttp.ClientSession) -> None:
        self.address = address
        self._session = session

    async def ask(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, **form: Any
    ) -> Reply:
        """Send a form, or nothing; the path follows the prefix."""
        async with self._session.request(
            method,
            self.address.rstrip("/") + path,
            headers=headers,
            data=form or None,
            allow_redirects=False,
        ) as reply:
            return Reply(reply.status, reply.headers, await reply.read())

    async def get(self, path: str, headers: Mapping[str, str] | None = None) -> Reply:
        """GET a page."""
        return await self.ask("GET", path, headers)


# No other process runs; one of somebody else's may, on the usual ports.
NOWHERE = "127.0.0.1:1"
ALONE: dict[str, Any] = {
    "console_listen": "127.0.0.1:0",
    "admin_listen": NOWHERE,
    "trainer_listen": NOWHERE,
    "controller_listen": NOWHERE,
    "upstream_url": f"http://{NOWHERE}/v1",
}

OpenConsole = Callable[..., AbstractAsyncContextManager[Pages]]


@pytest.fixture
def open_console(database_url: str) -> OpenConsole:
    """Run a console with other settings than the usual ones."""

    @asynccontextmanager
    async def run(url: str = database_url, **settings: Any) -> AsyncIterator[Pages]:
        async with (
            serving(ConsoleSettings(**(ALONE | settings)), url) as address,
            aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session,
        ):
            yield Pages(address, session)

    return run


@pytest.fixture
async def console(open_console: OpenConsole) -> AsyncIterator[Pages]:
    async with open_console() as pages:
        yield pages
