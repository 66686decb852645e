"""Look at pages as a person does: with Debian's Chromium, noting what must never happen."""

import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any, Final
from urllib.parse import urlsplit

import pytest
from playwright.async_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Dialog,
    Page,
    Request,
    async_playwright,
)

WIDE, NARROW = 1280, 360
HEIGHT: Final = 900
AXE: Final = files("axe_playwright_python").joinpath("axe.min.js")
GRAVE: Final = ("serious", "critical")
# What hostile text writes into the page's window if it runs.
RAN: Final = "window.ran"
# What htmx marks while it asks for a part, and while it puts it into its place.
_BUSY: Final = ".htmx-request, .htmx-swapping, .htmx-settling, .htmx-added"
# Chromium's own word for a reply that is no 2xx, which pages about errors have on purpose.
_STATUS: Final = re.compile(r"Failed to load resource: the server responded with a status of \d+")


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Start Chromium."""
    program = shutil.which("chromium")
    if program is None:
        pytest.fail("there is no Chromium: `apt-get install chromium` on Debian, then try again")
    async with async_playwright() as driver:
        # In a container root has no sandbox of its own.
        browser = await driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        await browser.close()


class View:
    """A tab, and what happened in it that must not: `wrongs`, in words."""

    def __init__(self, context: BrowserContext, page: Page, address: str) -> None:
        self.context, self.page = context, page
        self.wrongs: list[str] = []
        self._address, self._host = address.rstrip("/"), urlsplit(address).netloc
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.wrongs.append(f"error: {error}"))
        page.on("dialog", self._asked)
        page.on("request", self._requested)
        page.on("popup", lambda popup: self.wrongs.append(f"popup: {popup.url}"))

    async def open(self, path: str) -> int:
        """Go to a path after the prefix, wait for all its parts, and return its size in bytes."""
        reply = await self.page.goto(self._address + path)
        assert reply is not None
        await self.settled()
        return len(await reply.body())

    async def settled(self) -> None:
        """Wait until htmx has put all parts of the page into their places."""
        await self.page.wait_for_load_state()
        await self.page.wait_for_function("busy => !document.querySelector(busy)", arg=_BUSY)

    async def grave_findings(self) -> list[str]:
        """Return what axe-core finds serious or critical, with the first element of each."""
        if not await self.page.evaluate("() => typeof axe === 'object'"):
            await self.page.evaluate(AXE.read_text())
        found: dict[str, Any] = await self.page.evaluate("() => axe.run()")
        return [
            f"{one['id']}: {one['help']}: {one['nodes'][0]['html']:.200}"
            f" ({one['nodes'][0].get('failureSummary', ''):.300})"
            for one in found["violations"]
            if one["impact"] in GRAVE
        ]

    async def focus(self, label: str) -> None:
        """Press the tab key until the control of this label has the focus."""
        wanted = self.page.get_by_label(label, exact=True)
        for _ in range(60):
            await self.page.keyboard.press("Tab")
            if await wanted.evaluate("one => one === document.activeElement"):
                return
        pytest.fail(f"no key gets to {label!r}")

    async def overflow(self) -> int:
        """Return by how many pixels the page itself is wider than the window."""
        wider: int = await self.page.evaluate(
            "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        return wider

    async def _asked(self, dialog: Dialog) -> None:
        self.wrongs.append(f"dialog: {dialog.message}")
        await dialog.dismiss()

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not _STATUS.match(message.text):
            self.wrongs.append(f"{message.type}: {message.text}")

    def _requested(self, request: Request) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in ("data", "blob") and parts.netloc != self._host:
            self.wrongs.append(f"request: {request.url}")


@asynccontextmanager
async def view(
    browser: Browser,
    address: str,
    width: int = WIDE,
    *,
    dark: bool = False,
    headers: dict[str, str] | None = None,
) -> AsyncIterator[View]:
    """Open a tab with cookies of its own, in New York's time zone."""
    context = await browser.new_context(
        viewport={"width": width, "height": HEIGHT},
        color_scheme="dark" if dark else "light",
        timezone_id="America/New_York",
        locale="en-GB",
        reduced_motion="reduce",
        extra_http_headers=headers,
    )
    try:
        yield View(context, await context.new_page(), address)
    finally:
        await context.close()
