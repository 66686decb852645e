"""The console in a real Chromium: by eye, by keyboard, by key, with hostile texts in it."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import cycle
from typing import Final
from urllib.parse import quote

import asyncpg
import pytest
from playwright.async_api import Browser
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from benchmarks.ledger import LONG_RUN, fill_database
from console.pages import LARGEST_PAGE
from store.embedded import EmbeddedPostgres
from store.keys import create_key
from store.read.browsing import EpisodeFilter
from tests.conftest import Psql, database_of
from tests.integration.conftest import Proxy
from tests.integration.console.conftest import OpenConsole
from tests.support import hostile
from tests.support.browser import NARROW, RAN, WIDE, chromium, view
from tests.support.ledger.episodes import store
from tests.support.records import ago, call

pytestmark = pytest.mark.timeout(600)

# What judges, trainers and servers say, in their own rows.
_HOSTILE_ROWS: Final = """
    WITH said AS (
        SELECT one, place FROM unnest(CAST(:texts AS text[])) WITH ORDINALITY t (one, place)),
    judged AS (
        INSERT INTO judgements (episode_id, judge, outcome, reason, attempts, last_call_at)
        SELECT e.id, one, 'cannot_tell', one, 1, now() FROM said
            JOIN (SELECT id, row_number() OVER () AS place FROM episodes) e USING (place)),
    decided AS (
        INSERT INTO policy_events (id, name, version, from_state, to_state, reason, actor, evidence)
        SELECT uuidv7(), 'm', 0, 'serving', 'serving', one, 'operator', jsonb_build_object(one, one)
        FROM said)
    INSERT INTO updates (id, policy, parent_version, state, recipe, metrics, finished_at)
    SELECT uuidv7(), 'm', 0, 'abandoned', jsonb_build_object(one, one),
        jsonb_build_object('error', one, one, one, 'dropped', jsonb_build_object(one, 1)), now()
    FROM said WHERE place % 10 = 0
"""


@pytest.fixture(scope="module")
def ledger(postgres: EmbeddedPostgres, psql: Psql, template: str) -> Iterator[str]:
    """A ledger of every kind of record, which no test of this file changes."""
    with database_of(postgres, psql, template) as url:
        asyncio.run(fill_database(url, episodes=480))
        yield url


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as one:
        yield one


async def screens(url: str) -> list[str]:
    """Return an address of every screen, and of pages that say that something is wrong."""
    connection = await asyncpg.connect(url)
    trained, update = await connection.fetchrow(
        "SELECT episode_id, update_id FROM consumptions WHERE trained AND policy = 'sql' LIMIT 1"
    )
    long_run = await connection.fetchval("SELECT id FROM episodes WHERE key = $1", LONG_RUN)
    failed = await connection.fetchval("SELECT id FROM episodes WHERE failed AND root IS NULL")
    await connection.close()
    return [
        *("/?days=30", "/episodes", "/episodes?state=scored&low=0.2&high=0.9&agent=coder"),
        "/episodes?policy=sql&task=sql%2F0",
        *("/episodes?policy=nobody", "/episodes?low=x"),
        *(f"/episodes/{one}" for one in (trained, long_run, failed)),
        *("/versions?policy=sql", "/versions/sql/30", "/versions/sql/30/promote"),
        *("/updates?policy=sql", f"/updates/{update}", "/review", "/nowhere"),
    ]


# What fits depends on the width alone, and contrast on the colours alone.
@pytest.mark.parametrize(
    ("width", "dark"), [(WIDE, False), (NARROW, True)], ids=["wide-light", "narrow-dark"]
)
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


async def test_hostile_texts_are_shown_as_text_and_do_nothing(
    engine: AsyncEngine, open_console: OpenConsole, browser: Browser
) -> None:
    await store(engine, *hostile.records())
    async with engine.begin() as connection:
        await connection.execute(text(_HOSTILE_ROWS), {"texts": list(hostile.NAMES)})
        rows = (await connection.execute(text("SELECT id, key, task FROM episodes"))).all()
        updates = (await connection.execute(text("SELECT id FROM updates"))).scalars().all()
    assert len(rows) >= 200
    lists = ["/", "/episodes", "/versions?policy=m", "/versions/m/0", "/updates", "/review"]
    paths = [f"/episodes/{row.id}" for row in rows] + [f"/updates/{one}" for one in updates]
    # Each field of the filter with several texts: a page escapes all texts of a field in one place.
    fields = zip(rows[::5], cycle(EpisodeFilter.__struct_fields__), strict=False)
    paths += [f"/episodes?{name}={quote(row.task)}" for row, name in fields]
    wrong: dict[str, list[str]] = {}
    async with open_console() as console, view(browser, console.address, NARROW) as tab:
        for path in (*lists, *paths):
            size = await tab.open(path)
            if size > LARGEST_PAGE:
                tab.wrongs.append(f"{size} bytes")
            if await tab.page.evaluate(RAN) is not None:
                tab.wrongs.append("a text ran")
            if wider := await tab.overflow():
                tab.wrongs.append(f"{wider} pixels wider than the window")
            if tab.wrongs:
                wrong[path] = tab.wrongs[:]
                tab.wrongs.clear()
    assert wrong == {}


async def test_login_with_a_key_leads_to_the_requested_page(
    engine: AsyncEngine, open_console: OpenConsole, browser: Browser
) -> None:
    async with engine.begin() as connection:
        key = (await create_key(connection, "anna", ("read",))).key
    async with (
        open_console(console_prefix="/pawl") as console,
        view(browser, console.address) as tab,
    ):
        await tab.open("/episodes?state=scored")
        for given in ("pawl_wrong", key):
            # The field has the focus as soon as the page is there, and not before.
            await tab.page.locator("#key:focus").wait_for()
            await tab.page.keyboard.type(given)
            async with tab.page.expect_navigation():
                await tab.page.keyboard.press("Enter")
        assert tab.page.url.endswith("/pawl/episodes?state=scored")
        assert await tab.page.get_by_role("heading", level=1).inner_text() == "Episodes"
        assert await tab.page.evaluate("document.cookie") == ""
        await tab.page.get_by_role("button", name="Log out").press("Enter")
        await tab.page.get_by_role("heading", name="Log in").wait_for()
    assert tab.wrongs == []


async def test_open_list_shows_new_episodes(
    engine: AsyncEngine, open_console: OpenConsole, browser: Browser
) -> None:
    await store(engine, call("the-first"))
    async with open_console() as console, view(browser, console.address) as tab:
        await tab.open("/episodes")
        await tab.page.get_by_text("the-first").wait_for()
        await store(engine, call("the-second"))
        await tab.page.get_by_text("the-second").wait_for()
    assert tab.wrongs == []


async def test_episode_filter_is_set_by_keyboard_and_put_into_the_page_address(
    ledger: str, open_console: OpenConsole, browser: Browser
) -> None:
    async with open_console(ledger) as console, view(browser, console.address) as tab:
        await tab.open("/episodes")
        keys = tab.page.keyboard
        await keys.press("Tab")
        await keys.press("Enter")
        assert await tab.page.evaluate("location.hash") == "#main"
        await tab.focus("Policy")
        await keys.type("sql")
        await keys.press("Enter")
        await tab.page.wait_for_url("**policy=sql**")
        await tab.page.go_back()
    assert tab.wrongs == []


async def test_person_scores_episodes_by_number_keys_alone(
    proxy: Proxy, engine: AsyncEngine, open_console: OpenConsole, browser: Browser
) -> None:
    await store(engine, *(call(key, **ago(3600, place)) for place, key in enumerate("ab")))
    listen = proxy.url.removeprefix("http://")
    async with open_console(listen=listen) as console, view(browser, console.address) as tab:
        await tab.open("/review?policy=m")
        for pressed, posted in (("5", "Posted: b"), ("1", "Posted: a")):
            await tab.page.keyboard.press(pressed)
            await tab.page.get_by_text(posted).wait_for()
    assert tab.wrongs == []
