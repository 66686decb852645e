"""The screen Review: which episodes it shows, and that a score is posted once, by its viewer."""

import html
import re
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from store.judging import Judgement, review_queue, scales_of, store_judgement
from store.records import FeedbackRecord, SpoolRecord
from store.tenants import scoped
from store.version_states import ensure_base
from tests.integration.conftest import Proxy, Reply
from tests.integration.console.conftest import OpenConsole, Pages
from tests.support.browser import WIDE, chromium, view
from tests.support.ledger.episodes import ingest
from tests.support.proxy.keys import bearer, made, taken
from tests.support.records import START, ago, call, reward, statement
from tests.support.waiting import eventually


def by(record: FeedbackRecord, key: str) -> FeedbackRecord:
    """The statement as it came with an API key."""
    return msgspec.structs.replace(record, api_key=key)


@pytest.fixture
async def ledger(engine: AsyncEngine) -> AsyncEngine:
    """Episodes of `m`, each named for why it waits for a person, or for why it does not."""
    records: list[SpoolRecord] = [
        *(call(key, **ago(3600, number)) for number, key in enumerate(("old", "new", "scored"))),
        call("open"),
        call("theirs", policy="other", **ago(3600, 4)),
        reward(1.0, episode="scored"),
        *(call(key, **ago(3000, number)) for number, key in enumerate(("apart", "near", "mended"))),
        by(reward(1.0, episode="apart"), "a"),
        by(reward(0.2, at=9, episode="apart"), "b"),
        by(reward(1.0, episode="near"), "a"),
        by(reward(0.8, at=9, episode="near"), "b"),
        # Of one source the newest statement counts.
        by(reward(0.0, episode="mended"), "a"),
        by(reward(1.0, at=9, episode="mended"), "a"),
        *(call(key, **ago(2000, number)) for number, key in enumerate(("unsure", "sure", "mute"))),
        reward(1.0, episode="unsure"),
        statement("confidence", 0.3, episode="unsure"),
        reward(1.0, episode="sure"),
        statement("confidence", 0.9, episode="sure"),
    ]
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
        await ensure_base(connection, "other")
        await ingest(connection, records)
        mute = await connection.scalar(text("SELECT id FROM episodes WHERE key = 'mute'"))
        told = Judgement(
            episode_id=mute, judge="j", outcome="cannot_tell", attempts=1, last_call_at=START
        )
        await store_judgement(connection, told)
    return engine


def shown(reply: Reply) -> list[str]:
    """The episodes of the queue, in order."""
    assert reply.status == 200, reply.body
    names = r'(?:id="score">|<li>)<a [^>]*><bdi class="text">(\w+)<'
    return re.findall(names, reply.body.decode())


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("unscored", ["mute", "new", "old"]),
        ("disagreeing", ["apart"]),
        ("uncertain", ["mute", "unsure"]),
    ],
)
async def test_each_review_queue_lists_its_kind_of_episodes_newest_first(
    console: Pages, ledger: AsyncEngine, kind: str, keys: list[str]
) -> None:
    assert shown(await console.get(f"/review?policy=m&kind={kind}")) == keys


async def test_episodes_of_another_tenant_hide_none_of_the_viewers_own(engine: AsyncEngine) -> None:
    keys = ["own", *(scoped("other", f"e{number}") for number in range(3))]
    records = [call(key, **ago(3600, number)) for number, key in enumerate(keys)]
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
        await ingest(connection, records)
        scales = await scales_of(connection, "m")
        for tenant, newest in (("default", keys[0]), ("other", keys[-1])):
            [row] = await review_queue(connection, "m", "unscored", scales, tenant, most=1)
            assert row.key == newest


async def test_crafted_link_shows_no_posted_message(console: Pages, ledger: AsyncEngine) -> None:
    for done in ("Your%20key%20is%20wrong", str(uuid4())):
        page = (await console.get(f"/review?policy=m&done={done}")).body.decode()
        assert ("Posted" in page, "Your key" in page) == (False, False)


@pytest.fixture
async def reviewed(
    proxy: Proxy, open_console: OpenConsole, ledger: AsyncEngine
) -> AsyncIterator[Pages]:
    """A console beside a proxy."""
    async with open_console(listen=proxy.settings.listen) as pages:
        yield pages


def fields(reply: Reply) -> dict[str, str]:
    body = reply.body.decode()
    named = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', body)
    return {name: html.unescape(value) for name, value in named}


async def test_review_form_has_no_preselected_value(console: Pages, ledger: AsyncEngine) -> None:
    [field, *keys] = re.findall(
        r'<[^>]*name="value:[^>]*>', (await console.get("/review?policy=m")).body.decode()
    )
    assert (" required" in field, " value=" in field) == (True, False)
    # They come after the empty field, which counts no more then.
    assert [key.startswith("<button formnovalidate") for key in keys] == [True] * 5


async def test_score_sent_twice_is_posted_once_with_the_viewers_key(
    reviewed: Pages, proxy: Proxy, ledger: AsyncEngine
) -> None:
    key = await made(ledger, "anna", "read", "feedback")
    await taken(proxy, key)
    anna = bearer(key)
    page = await reviewed.get("/review?policy=m", anna)
    form = fields(page) | {"value:reward": "0.75"}
    for _ in range(2):
        sent = await reviewed.ask("POST", "/review?policy=m", anna, **form)
        assert sent.status == 303, sent.body
    assert "before=" in sent.headers["Location"]
    assert shown(await reviewed.get(sent.headers["Location"], anna)) == ["new", "old"]
    query = text(
        "SELECT f.value, k.name FROM feedback f JOIN feedback_requests r ON r.id = f.request_id"
        " JOIN api_keys k ON k.id = r.api_key"
        " JOIN episodes e ON e.id = f.episode_id WHERE e.key = 'mute'"
    )

    async def stored() -> bool:
        async with ledger.connect() as connection:
            return (await connection.execute(query)).all() == [(0.75, "anna")]

    await eventually(stored)
    following = (await reviewed.get(sent.headers["Location"], anna)).body.decode()
    assert "Posted: mute, reward 0.75" in re.sub("<[^>]+>", "", following)
    # It has left the queue, and every other part of it.
    assert shown(await reviewed.get("/review?policy=m", anna)) == ["new", "old"]
    assert shown(await reviewed.get("/review?policy=m&kind=uncertain", anna)) == ["unsure"]
    # Another value from the same page is refused by the proxy, which says why.
    other = await reviewed.ask("POST", "/review?policy=m", anna, **form | {"value:reward": "0"})
    assert (other.status, b"already used for another body" in other.body) == (409, True)


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        ({"value:reward": "7"}, 400, "a number from 0 to 1"),
        ({"value:reward": "nan"}, 400, "a number from 0 to 1"),
        ({"value:reward": ""}, 400, "There is no score"),
        ({"episode": "01900000-0000-7000-8000-000000000000"}, 404, "no such episode"),
    ],
)
async def test_review_of_an_invalid_score_or_unknown_episode_is_refused(
    console: Pages, ledger: AsyncEngine, change: dict[str, str], status: int, said: str
) -> None:
    form = fields(await console.get("/review?policy=m")) | {"value:reward": "1"} | change
    sent = await console.ask("POST", "/review?policy=m", **form)
    assert (sent.status, said in sent.body.decode()) == (status, True)


async def test_review_score_is_refused_without_scope_tenant_own_page_or_proxy(
    open_console: OpenConsole, ledger: AsyncEngine
) -> None:
    reader = await made(ledger, "reader", "read")
    scorer = await made(ledger, "scorer", "read", "feedback")
    theirs = await made(ledger, "theirs", "read", "feedback", tenant="acme")
    path = "/review?policy=m"
    async with open_console(listen="127.0.0.1:9") as console:
        form = fields(await console.get(path, bearer(scorer))) | {"value:reward": "1"}
        for key, more, status in (
            (reader, {}, 403),
            (theirs, {}, 404),
            (scorer, {"Sec-Fetch-Site": "cross-site"}, 403),
            (scorer, {}, 502),
        ):
            sent = await console.ask("POST", path, bearer(key) | more, **form)
            assert sent.status == status, sent.body
        assert b"send it again, which counts once" in sent.body


async def test_reviewer_scores_and_skips_episodes_by_keyboard(reviewed: Pages) -> None:
    async with chromium() as browser, view(browser, reviewed.address, WIDE) as tab:
        await tab.open("/review?policy=m")
        await tab.page.keyboard.press("s")
        await tab.page.get_by_role("heading", name="new").wait_for()
        await tab.page.keyboard.press("5")
        await tab.page.get_by_text("Posted: new").wait_for()
        assert await tab.page.get_by_role("heading", name="old").is_visible()


async def test_reviewer_posts_a_correction_with_the_score(
    reviewed: Pages, ledger: AsyncEngine, tmp_path: Path
) -> None:
    async with chromium() as browser, view(browser, reviewed.address, WIDE) as tab:
        await tab.open("/review?policy=m")
        await tab.page.get_by_text("Correct a reply").click()
        await tab.settled()
        options = tab.page.get_by_label("Reply of").locator("option")
        assert await options.all_inner_texts() == ["call 1, default"]
        written = tab.page.get_by_label("The right reply, in full")
        # Number keys write, and post nothing, while one writes.
        await written.fill("It is 5.\nOr 55.")
        await written.press("5")
        assert await tab.page.get_by_role("status").count() == 0
        await tab.page.screenshot(path=tmp_path / "review.png")
        await tab.page.get_by_role("button", name="1 0", exact=True).click()
        await tab.page.get_by_text("Posted: mute").wait_for()
    query = text(
        "SELECT f.value, f.correction, f.target_kind FROM feedback f"
        " JOIN episodes e ON e.id = f.episode_id WHERE e.key = 'mute' ORDER BY f.correction"
    )

    async def stored() -> bool:
        async with ledger.connect() as connection:
            rows = (await connection.execute(query)).all()
        return rows == [(0.0, "It is 5.\nOr 55.5", "call"), (0.0, None, "episode")]

    await eventually(stored)
