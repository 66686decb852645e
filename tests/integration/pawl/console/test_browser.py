"""The console in a real Chromium: by eye, by keyboard, by key, with hostile texts in it."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from playwright.async_api import Browser

from benchmarks.ledger import fill
from store.embedded import EmbeddedPostgres
from tests.conftest import Psql, database_of
from tests.integration.pawl.console.conftest import OpenConsole
from tests.support.browser import NARROW, WIDE, chromium, view

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def ledger(postgres: EmbeddedPostgres, psql: Psql, template: str) -> Iterator[str]:
    """A ledger of every kind of record, which no test of this file changes."""
    with database_of(postgres, psql, template) as url:
        asyncio.run(fill(url, episodes=480))
        yield url


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as one:
        yield one


async def screens(url: str) -> list[str]:
    """Return an address of every screen, and of those that say that something is wrong."""
    return ["/", "/nowhere"]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [WIDE, NARROW])
async def test_every_screen_is_sound_and_accessible(
    ledger: str, open_console: OpenConsole, browser: Browser, width: int, dark: bool
) -> None:
    found: dict[str, list[str]] = {}
    async with (
        open_console(ledger) as console,
        view(browser, console.address, width, dark=dark) as tab,
    ):
        for path in await screens(ledger):
            await tab.open(path)
            findings = await tab.grave_findings() + tab.wrongs
            if wider := await tab.overflow():
                findings.append(f"{wider} pixels wider than the window")
            if findings:
                found[path] = findings
            tab.wrongs.clear()
    assert found == {}
