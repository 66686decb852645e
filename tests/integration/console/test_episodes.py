"""The screens Overview and Episodes: what they show, and how a list is gone through."""

import asyncio
import html
import json
import re
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from console.pages import format_number
from store.keys import create_key
from store.records import SpoolRecord
from store.tenants import scoped
from store.version_states import ensure_base
from store.write.ingest import Ingester
from tests.integration.console.conftest import Pages
from tests.support.ledger.episodes import ingest, store
from tests.support.ledger.lineage import promote, trained
from tests.support.records import ago, call, reward

HOSTILE = "<script>alert(1)</script>\u202e"
PARTS = ("/", "/overview/figures", "/overview/doctor", "/episodes/counts")


async def shown(console: Pages, path: str, headers: dict[str, str] | None = None) -> str:
    reply = await console.get(path, headers)
    assert reply.status == 200, (path, reply.body)
    return reply.body.decode()


def links(page: str) -> list[str]:
    return [one.replace("&amp;", "&") for one in re.findall(r'href="([^"]+)"', page)]


async def test_pages_of_an_empty_database_show_the_first_step(console: Pages) -> None:
    assert "OPENAI_BASE_URL" in await shown(console, "/overview/figures")
    assert "OPENAI_BASE_URL" in await shown(console, "/episodes")
    for path in PARTS:
        await shown(console, path)


async def test_links_of_the_episode_list_reach_all_episodes_and_keep_the_filter(
    console: Pages, engine: AsyncEngine
) -> None:
    records = [call(f"run-{n:03}", **ago(9000 - n), task="t") for n in range(120)]
    others = [call("other", **ago(9), task="u")]
    await Ingester().store(engine, [*records, *others])
    names: list[str] = []
    page = await shown(console, "/episodes?task=t")
    assert 'hx-trigger="every' in page
    while True:
        names += re.findall(r'class="text">(run-\d+|other)<', page)
        older = [link for link in links(page) if "before=" in link]
        if not older:
            break
        assert "task=t" in older[0]
        page = await shown(console, older[0])
        # Whoever reads an older part is not interrupted.
        assert 'hx-trigger="every' not in page
    assert names == [f"run-{n:03}" for n in reversed(range(120))]


async def test_hostile_names_are_shown_as_text_and_kept_in_links(
    console: Pages, engine: AsyncEngine
) -> None:
    odd = {"agent": HOSTILE, "task": f"t&{HOSTILE}", "policy": f'm"{HOSTILE}'}
    greedy = {"trainable": False, "reason": "greedy"}
    await Ingester().store(
        engine,
        [call("e", **odd), call("e", **odd, **greedy), reward(0.5, episode="e")],
    )
    async with engine.begin() as connection:
        await ensure_base(connection, odd["policy"], "base")
    for path in (*PARTS, "/episodes"):
        assert "<script>a" not in await shown(console, path)
        assert "\u202e" not in await shown(console, path)
    page = await shown(console, "/episodes")
    for name in ("agent=", "task=", "policy="):
        [link] = {one for one in links(page) if f"?{name}" in one}
        assert ">e<" in await shown(console, link)
    assert ">e<" not in await shown(console, "/episodes?agent=nobody")
    assert "&lt;script&gt;" in await shown(console, "/overview/figures")


async def test_side_call_is_shown_with_its_kind_and_left_out_of_the_trainable_share(
    console: Pages, engine: AsyncEngine
) -> None:
    side = {"trainable": False, "reason": "side", "side": "compaction"}
    calls = [call("e"), call("e", **side), call("e")]
    await Ingester().store(engine, [*calls, reward(0.5, episode="e")])
    text = " ".join(re.sub(r"<[^>]*>", "", await shown(console, "/overview/figures")).split())
    assert "100 % of them can be trained, not counting side calls such as titles (1)." in text
    listed = links(await shown(console, "/episodes?reason=side"))
    [link] = {one for one in listed if re.search(r"/episodes/[0-9a-f-]{36}$", one)}
    page = await shown(console, link)
    assert "not trainable: side" in page
    assert "side call: compaction" in page
    assert page.count(", a compaction") == 1


async def test_overview_shows_live_and_held_out_rewards_with_intervals(
    console: Pages, engine: AsyncEngine
) -> None:
    held_out = [call("e", task="eval/1", split="eval"), reward(0.25, episode="e")]
    scores = [("a", 1.0), ("b", 0.0), ("c", 1.0)]
    live = [(call(key, task=key), reward(value, episode=key)) for key, value in scores]
    await Ingester().store(
        engine, [*(one for pair in live for one in pair), *held_out, call("d", task="d")]
    )
    page = await shown(console, "/overview/figures")
    # Wilson's interval of two in three, and one value that has none.
    for text in ('0.667</b> <span class="dim">0.208 to 0.939<', "3 of 4 episodes"):
        assert text in page
    assert re.search(r"0\.250</b>\s*<br><span class=\"dim\">1 of 1 episodes", page)
    # The fifth is evaluation, which nobody means to train.
    assert "4 episodes, 0 % trained" in page


async def test_overview_says_how_many_episodes_an_hour_count_towards_an_update(
    console: Pages, engine: AsyncEngine
) -> None:
    rewards = [(f"t-{number}", float(number % 2)) for number in range(5)]
    records = [(call(task, task=task), reward(value, episode=task)) for task, value in rewards]
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
        await ingest(connection, [*(one for pair in records for one in pair), call("unpaid")])
    page = await shown(console, "/overview/doctor")
    counted = "about 5 of 6 episodes an hour count towards an update (of 6: 1 without a reward)"
    assert f"m: {counted}" in page
    assert "send rewards for more runs, or let `pawl judge` score them, such as by" in page


async def test_doctor_page_is_answered_while_another_page_reads_the_database(
    console: Pages, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_read, may_end = asyncio.Event(), asyncio.Event()

    async def held(*_: Any) -> list[Any]:
        is_read.set()
        await may_end.wait()
        return []

    monkeypatch.setattr("console.overview.count_newest_calls", held)
    figures = asyncio.create_task(console.get("/overview/figures"))
    await is_read.wait()
    doctor = await shown(console, "/overview/doctor")
    may_end.set()
    assert (await figures).status == 200
    assert "database" not in doctor.lower()


@pytest.mark.parametrize(
    ("attempts", "right", "verdict"),
    [(1, 18, "Better"), (1, 2, "Unclear"), (8, 18, "Unclear"), (1, 0, "Worse")],
    ids=["by independent episodes", "alike", "by eight attempts at a few tasks", "worse"],
)
async def test_overview_says_whether_a_policy_is_better_than_version_0(
    console: Pages, engine: AsyncEngine, attempts: int, right: int, verdict: str
) -> None:
    """Of version 0 a fifth of 20 episodes succeeds, or all but two, of version 1 `right` of 20."""
    before = 18 if right == 0 else 4
    records: list[SpoolRecord] = []
    for version, succeeded in ((0, before), (1, right)):
        for number in range(20):
            key, task = f"{version}-{number}", f"{version}-{number // attempts}"
            records.append(call(key, policy_version=version, task=task))
            records.append(reward(float(number < succeeded), episode=key))
    async with engine.begin() as connection:
        await trained(connection, 0)
        await promote(connection, "m", 1)
        await ingest(connection, records)
    page = re.sub("<[^>]+>", "", await shown(console, "/overview/figures"))
    means = f"reward {format_number(before / 20)} → {format_number(right / 20)}"
    assert f"{verdict} since version 0: {means}, a difference of" in page


QUESTION = "How many customers ordered in May?"


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ({"content": "There are 42."}, "There are 42."),
        ({"content": "Let me think. " * 60 + "It is 42."}, "It is 42."),
        ({"tool_calls": [{"function": {"name": "count", "arguments": '{"a": 1}'}}]}, "count {"),
        (None, ""),
    ],
    ids=["short", "long", "tool call", "failed"],
)
async def test_episode_list_shows_question_and_last_answer_instead_of_episode_names(
    console: Pages, engine: AsyncEngine, reply: dict[str, Any] | None, answer: str
) -> None:
    said = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "An example."},
        {"role": "assistant", "content": "Its answer."},
        {"role": "user", "content": "Here are documents. " * 90 + QUESTION},
    ]
    first = json.dumps({"messages": said}).encode()
    later = {"role": "assistant", "content": "I look."}, {"role": "user", "content": "Go on."}
    message = {"choices": [{"message": {"role": "assistant"} | reply}]} if reply else {"error": "x"}
    name = "0192f7a0-0000-7000-8000-000000000001"
    await store(
        engine,
        call(name, request=first, **ago(20)),
        call(
            name,
            request=json.dumps({"messages": [*said, *later]}).encode(),
            reply=json.dumps(message).encode(),
            **ago(10),
        ),
    )
    page = await shown(console, "/episodes")
    [(title, question)] = re.findall(
        r'<td data-th="Question"><a href="[^"]+" title="([^"]+)">(.*?)</a>', page
    )
    assert (title, name in question) == (name, False)
    assert question.endswith(f"{QUESTION}</bdi>")
    assert len(question) < 200
    [listed] = re.findall(r'<td data-th="Answer">(.*?)</td>', page)
    assert answer in html.unescape(listed)
    assert len(listed) < 200


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("low=x", "low: write a number, such as 0.5."),
        ("before=x", "before: write the id of an episode."),
        ("policy=%FF%00", "policy: write at most 512 characters, without U+0000."),
    ],
)
async def test_invalid_filter_is_refused_with_the_name_of_its_field(
    console: Pages, query: str, said: str
) -> None:
    reply = await console.get(f"/episodes?{query}")
    assert (reply.status, said in reply.body.decode()) == (400, True)


async def test_console_key_sees_only_its_tenants_data_and_an_admin_key_sees_all(
    console: Pages, engine: AsyncEngine
) -> None:
    acme = {name: scoped("acme", f"{name}-of-acme") for name in ("episode", "task")}
    await Ingester().store(engine, [call("e-of-all", task="task-of-all"), call(**acme)])
    async with engine.begin() as connection:
        keys = {
            "acme": await create_key(connection, "a", ("read",), tenant="acme"),
            "default": await create_key(connection, "b", ("read",)),
            "admin": await create_key(connection, "c", ("read", "admin")),
        }
    seen = {}
    for name, key in keys.items():
        page = await shown(console, "/episodes", {"Authorization": f"Bearer {key.key}"})
        seen[name] = ("e-of-all" in page, "episode-of-acme" in page)
    assert seen == {"acme": (False, True), "default": (True, False), "admin": (True, True)}
    # Nor what the processes are, which all tenants share; none runs here.
    doctor = {}
    for name, key in keys.items():
        page = await shown(console, "/overview/doctor", {"Authorization": f"Bearer {key.key}"})
        doctor[name] = "127.0.0.1" in page
    assert doctor == {"acme": False, "default": False, "admin": True}
