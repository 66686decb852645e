"""The screen Episode shows a recorded episode: what was said, and what it is worth."""

import asyncio
import json
import math
import re
import subprocess
import sys
import threading
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import msgspec
import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import AsyncEngine

from console import conversation, episode
from console import tokens as token_screen
from console.pages import format_number
from pawl.credit import explain_past
from store.ids import new_id
from store.read import detail
from store.records import CallRecord, SpoolRecord, ToolCall
from store.tenants import scoped
from store.values.packing import pack_logprobs, unpack_logprobs
from tests.integration.conftest import Pawl
from tests.integration.console.conftest import OpenConsole, Pages
from tests.support.ledger.episodes import episodes, store
from tests.support.ledger.updates import claimed, record_update
from tests.support.proxy.keys import bearer, key_of
from tests.support.records import START, ago, call, reward, statement, tokens, tool_event
from tests.support.servers.fake_server import fake_model_server
from trainer.recipes.recipe import Recipe
from trainer.updates.claiming import claim_rule
from trainer.updates.plan import plan_update

RECIPE = Recipe.model_validate(
    {
        "claim": {"group_size": 4, "groups": 2},
        "credit": {"assignment": "per_agent", "equal_weight": "token"},
    }
)
SYSTEM = {"role": "system", "content": "Answer with one SQL query."}
TOOLS = [{"type": "function", "function": {"name": "run_sql"}}]


def chat_call(
    episode: str, said: list[dict[str, Any]], reply: dict[str, Any], **changes: Any
) -> CallRecord:
    """Make a call of chat completions; the reply becomes part of what the agent says next."""
    request = {"model": "m", "messages": said, "tools": TOOLS}
    tools = [one["function"] | {"id": one["id"]} for one in reply.get("tool_calls", ())]
    tools = json.loads(json.dumps(tools).replace("\\ud800", "").replace("\\u0000", ""))
    made = call(
        episode,
        request=json.dumps(request).encode(),
        reply=json.dumps({"id": "r", "choices": [{"index": 0, "message": reply}]}).encode(),
        tool_calls=tuple(ToolCall(**one) for one in tools),
        **changes,
    )
    said.append(reply)
    return made


def attempt(
    name: str, task: str, calls: int, score: float, seed: int, age_s: float = 600.0
) -> list[SpoolRecord]:
    """Make an attempt of two agents: calls with tools that end in different ways, and a reward."""
    said: list[dict[str, Any]] = [
        SYSTEM,
        {"role": "user", "content": f"How many customers of {task} ordered in May?"},
    ]
    records: list[SpoolRecord] = []
    told: tuple[Any, ...] = ()
    for number in range(calls):
        last = number == calls - 1
        tool_id = f"call_{name}_{number}"
        reply: dict[str, Any] = {"role": "assistant", "content": f"There are {seed + 40}."}
        if not last:
            query = json.dumps(
                {"query": f"SELECT count(*) FROM orders -- {seed if number else ''}"}
            )
            function = {"name": "run_sql", "arguments": query}
            reply = {"role": "assistant", "content": None, "reasoning_content": "I should look."}
            reply["tool_calls"] = [{"id": tool_id, "type": "function", "function": function}]
        ids = list(range(100, 103 + (seed + number) % 5))
        records.append(
            chat_call(
                name,
                said,
                reply,
                task=task,
                agent="checker" if number % 3 == 2 else "writer",
                tokens=tokens([1, 2, 3 + number], ids, logprob=-0.1 - seed / 3),
                tool_events=told,
                total_ms=1500.0,
                **ago(age_s - 3 * number, seed),
            )
        )
        status = ("ok", "error", "timeout", "ok", "malformed")[(seed + number) % 5]
        told = (tool_event(status, tool_id),)
        if not last:
            said.append({"role": "tool", "tool_call_id": tool_id, "content": f"{seed} rows"})
    late = int((datetime.now(UTC) - START).total_seconds())
    records.append(reward(score, at=late, episode=name))
    records.append(statement("latency", 1.5 * seed, at=late, episode=name))
    return records


async def train(engine: AsyncEngine, recipe: Recipe) -> None:
    """Claim what waits, and consume it into version 1."""
    claim = await claimed(engine, claim_rule(recipe, "m"), recipe=recipe.model_dump(mode="json"))
    assert claim is not None
    await record_update(engine, claim, plan_update(claim, recipe))


async def fill(engine: AsyncEngine, calls: int = 5, recipe: Recipe = RECIPE) -> None:
    """Two tasks with four attempts each, which an update has consumed."""
    records = [
        record
        for place in range(8)
        for record in attempt(
            f"run-{place}", f"sql/{place // 4}", calls, (place % 4) / 4, place, 900 - 60 * place
        )
    ]
    await store(engine, *records)
    await train(engine, recipe)


async def ids(engine: AsyncEngine) -> dict[str, str]:
    """Return the id of each episode by its key."""
    return {episode.key: str(episode.id) for episode in await episodes(engine)}


async def credit_of(engine: AsyncEngine, key: str) -> str:
    """Return the address of an episode's credit in the one update."""
    async with engine.connect() as connection:
        update = await connection.scalar(sqlalchemy.text("SELECT id FROM updates"))
    return f"/updates/{update}/credit?episode={(await ids(engine))[key]}"


def shown_credit(body: bytes) -> dict[tuple[int, str], float]:
    """Return the figures of a page's arithmetic, exactly, by call and name."""
    figures: dict[tuple[int, str], float] = {}
    head, _, rows = body.decode().partition("<tbody>")
    names = re.findall(r"<th[^>]*>(.*?)</th>", head)
    for row in rows.split("<tr>")[1:]:
        cells = re.findall(r"<td[^>]*>(.*?)</td>", row)
        calls: list[int] = []
        for part in cells[0].split(", "):
            first, _, last = part.partition(" to ")
            calls += range(int(first), int(last or first) + 1)
        for name, cell in zip(names, cells, strict=True):
            values = [float(value) for value in re.findall(r'<data value="([^"]*)"', cell)]
            each = values if len(values) == len(calls) else values[:1] * len(calls)
            pairs = zip(calls, each, strict=bool(values))
            figures |= {(call, name.lower()): value for call, value in pairs}
    return figures


@pytest.mark.parametrize("credit", [{"assignment": "per_agent"}, {"normalisation": "batch"}])
async def test_episode_page_shows_the_same_credit_as_pawl_credit_for_200_calls(
    engine: AsyncEngine, console: Pages, pawl: Pawl, credit: dict[str, str]
) -> None:
    recipe = {"claim": {"group_size": 4, "groups": 2}, "credit": credit | {"equal_weight": "token"}}
    await fill(engine, calls=25, recipe=Recipe.model_validate(recipe))
    lines = (await pawl("credit", "--update", "1")).stdout.splitlines()
    assert len(lines) == 200
    place: dict[str, int] = {}
    by_episode: dict[str, dict[tuple[int, str], float]] = {}
    for line in map(json.loads, lines):
        key = line["episode"]
        place[key] = number = place.get(key, 0) + 1
        names = {"reward": "r_final", "tools": "r_air", "advantage": "advantage"}
        names["share of the loss"] = "weight"
        by_episode.setdefault(key, {}).update({(number, n): line[f] for n, f in names.items()})
    for key, expected in by_episode.items():
        page = await console.get(await credit_of(engine, key), {"HX-Request": "true"})
        figures = shown_credit(page.body)
        assert {at: figures[at] for at in expected} == expected
        for each in range(1, 26):
            own = {name: value for (of, name), value in figures.items() if of == each}
            steps = own["difference"] / own["spread"] + own["tools, compared"]
            assert steps == pytest.approx(own["advantage"], abs=1e-12)


async def test_credit_page_shows_the_agents_own_returns_beside_its_baseline(
    engine: AsyncEngine, console: Pages
) -> None:
    late = int((datetime.now(UTC) - START).total_seconds())
    scores = {("a", "writer"): 0.0, ("a", "checker"): 1.0, ("b", "writer"): 0.5}
    for place, ((name, agent), score) in enumerate((scores | {("b", "checker"): 1.0}).items()):
        made = call(name, task="t", agent=agent, **ago(900 - place))
        await store(engine, made, reward(score, at=late, call=str(made.id)))
    await store(engine, *(reward(0.9, at=late, episode=name) for name in "ab"))
    await train(
        engine,
        Recipe.model_validate(
            {"claim": {"group_size": 2, "groups": 1}, "credit": {"assignment": "per_agent"}}
        ),
    )
    page = await console.get(await credit_of(engine, "a"))
    assert "baseline = group" in page.body.decode()
    assert re.findall(r"of [\d.]+, [^<]*", page.body.decode()) == ["of 0, 0.500", "of 1, 1"]


async def test_concurrent_views_of_an_episodes_credit_compute_it_once(
    engine: AsyncEngine, console: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[str] = []

    def explain(past: Any) -> Any:
        computed.append(threading.current_thread().name)
        return explain_past(past)

    monkeypatch.setattr(episode, "explain_past", explain)
    await fill(engine)
    path = await credit_of(engine, "run-2")
    pages = await asyncio.gather(*(console.get(path) for _ in range(8)))
    assert all("baseline = group" in page.body.decode() for page in pages)
    assert len(computed) == 1
    assert computed != [threading.main_thread().name]


async def test_credit_of_large_replies_is_not_computed_on_the_page(
    engine: AsyncEngine, console: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(engine)
    whole = "SELECT sum(length(request) + COALESCE(request_prefix + request_suffix, 0)) AS size"
    async with engine.connect() as connection:
        requests = await connection.scalar(sqlalchemy.text(f"{whole} FROM transitions"))
    monkeypatch.setattr(detail, "LARGEST_EXPLAINED", requests)
    path = await credit_of(engine, "run-2")
    assert "too large to compute here" in (await console.get(path)).body.decode()


async def test_page_shows_an_episodes_messages_and_training_outcome(
    engine: AsyncEngine, console: Pages
) -> None:
    await fill(engine)
    known = await ids(engine)
    page = (await console.get(f"/episodes/{known['run-2']}")).body.decode()
    for text in (
        "How many customers of sql/0 ordered in May?",
        "repeats 2 messages and the reply to them, and adds",
        '<bdi class="text">run_sql</bdi>',
        "There are 42.",
        "timeout</span>",
        "Trained</span> by",
        "version 1</a>, which is written now",
    ):
        assert text in page
    # What was said before is not said again.
    assert page.count("How many customers") == 1
    later = await console.get(await credit_of(engine, "run-2"))
    assert "of 0, 0.250, 0.500, 0.750<" in later.body.decode()
    assert (await console.get(f"/episodes/{new_id()}")).status == 404


async def test_tokens_show_log_probability_and_whether_they_are_trained(
    engine: AsyncEngine, console: Pages
) -> None:
    await fill(engine)
    [episode] = [one for one in await episodes(engine) if one.key == "run-3"]
    page = (await console.get(f"/calls/{episode.calls[0].id}/tokens")).body.decode()
    assert 'title="1: id 100, log-probability −1.1' in page
    assert "its 6 tokens are trained on" in page
    assert "No model server gives the texts" in page
    assert "No ratio was recorded" in page


@pytest.mark.parametrize(
    ("log_ratios", "shown"),
    [
        ((0.0, 0.0, 0.0, 0.0, 0.0, 0.3), "its 6 tokens are trained on"),
        ((0.0, 0.0, 0.0, 0.0, 0.0, 12.0), "no token carries loss: the ratio is out of bounds"),
        ((0.0, 0.0, 0.0, 0.0, -2e3, -3e3), "no token carries loss: the ratio is out of bounds"),
        ((2e3, 0.0, 0.0, 0.0, 0.0, 2e3), "no token carries loss: the ratio is out of bounds"),
    ],
)
async def test_tokens_are_shown_with_their_ratios_and_whether_the_call_is_masked(
    engine: AsyncEngine, console: Pages, log_ratios: tuple[float, ...], shown: str
) -> None:
    await fill(engine)
    [episode] = [one for one in await episodes(engine) if one.key == "run-3"]
    call = episode.calls[0]
    sampled = unpack_logprobs(call.tokens.sampled_logprobs)
    policy = [then + one for then, one in zip(sampled, log_ratios, strict=True)]
    values = {"id": call.id, "policy": pack_logprobs(policy)}
    async with engine.begin() as connection:
        query = "UPDATE transitions SET policy_logprobs = :policy WHERE id = :id"
        await connection.execute(sqlalchemy.text(query), values)
    page = (await console.get(f"/calls/{call.id}/tokens")).body.decode()
    assert shown in page
    assert f"ratio {format_number(math.exp(min(log_ratios[5], 700)), 3)}"[:8] in page


async def test_tokens_are_shown_as_ids_while_the_model_server_hangs(
    engine: AsyncEngine, open_console: OpenConsole, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(engine)
    monkeypatch.setattr(token_screen, "TEXTS_S", 0.2)
    [episode] = [one for one in await episodes(engine) if one.key == "run-3"]
    connections: list[asyncio.StreamWriter] = []

    def keep(_: asyncio.StreamReader, connection: asyncio.StreamWriter) -> None:
        connections.append(connection)

    async with (
        await asyncio.start_server(keep, "127.0.0.1", 0) as silent,
        open_console(
            upstream_url=f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}/v1"
        ) as console,
    ):
        page = (await console.get(f"/calls/{episode.calls[0].id}/tokens")).body.decode()
        for connection in connections:
            connection.close()
    assert "No model server gives the texts" in page


async def test_page_of_hostile_texts_stays_below_two_megabytes(
    engine: AsyncEngine, console: Pages
) -> None:
    worst = '"\u200b' * 500
    made = []
    for n in range(20):
        event = tool_event("error", None)
        events = (
            msgspec.structs.replace(
                event, id=uuid4(), tool_id=f"{worst[:50]}{one}", name=worst, detail=worst
            )
            for one in range(20)
        )
        said = [{"role": "user", "content": f"{n} {worst * 10}"} for _ in range(10)]
        reply = {"role": "assistant", "content": worst * 20}
        made.append(
            chat_call("worst", said, reply, task="t", tool_events=tuple(events), **ago(200 - n, n))
        )
    await store(engine, *made)
    [episode] = await episodes(engine)
    page = await console.get(f"/episodes/{episode.id}")
    assert page.status == 200
    assert len(page.body) <= 2_000_000


async def test_tokens_are_shown_with_the_model_servers_texts(
    engine: AsyncEngine, open_console: OpenConsole
) -> None:
    await fill(engine)
    [episode] = [one for one in await episodes(engine) if one.key == "run-3"]
    async with (
        fake_model_server() as server,
        open_console(upstream_url=server.url) as console,
    ):
        server.texts = {7: "\x1e", **dict.fromkeys(range(100, 106), " <b>"), 100: "SELECT"}
        page = (await console.get(f"/calls/{episode.calls[0].id}/tokens")).body.decode()
    assert '<bdi class="text">SELECT</bdi>' in page
    assert "&lt;b&gt;" in page
    assert "No model server gives" not in page


async def test_attempts_at_a_task_are_compared_in_the_list_and_by_their_credit(
    engine: AsyncEngine, console: Pages
) -> None:
    await fill(engine)
    listed = (await console.get("/episodes?policy=m&task=sql/0")).body.decode()
    assert listed.count("How many customers of sql/0 ordered in May?</bdi>") == 4
    assert re.findall(r"There are (\d+)\.</bdi>", listed) == ["43", "42", "41", "40"]
    async with engine.connect() as connection:
        update = await connection.scalar(sqlalchemy.text("SELECT id FROM updates"))
    page = (await console.get(f"/updates/{update}")).body.decode()
    [credit] = {link for link in re.findall(r'href="([^"]*credit[^"]*)"', page) if "%2F0" in link}
    shown = (await console.get(credit)).body.decode()
    assert set(re.findall(r">(run-\d)</bdi>", shown)) == {"run-0", "run-1", "run-2", "run-3"}
    assert "of 0, 0.250, 0.500, 0.750<" in shown


async def test_raw_request_and_reply_are_downloaded_as_recorded(
    engine: AsyncEngine, console: Pages
) -> None:
    odd = call("odd", request=None, request_raw=b"\xff<script>", reply=None, reply_raw=b"no \x00")
    await store(engine, *attempt("run", "sql/1", 4, 1.0, 1), odd)
    [run] = [one for one in await episodes(engine) if one.key == "run"]
    # All but the first are stored as what they add.
    for each in run.calls:
        whole = await console.get(f"/calls/{each.id}/request")
        assert whole.body == each.request
        assert (await console.get(f"/calls/{each.id}/reply")).body == each.reply
    assert whole.headers["Content-Type"] == "text/plain; charset=utf-8"
    assert whole.headers["Content-Disposition"].startswith("attachment;")
    assert whole.headers["X-Content-Type-Options"] == "nosniff"
    for part, body in (("request", b"\xff<script>"), ("reply", b"no \x00")):
        assert (await console.get(f"/calls/{odd.id}/{part}")).body == body
    for path in (f"{odd.id}/nothing", f"{new_id()}/reply", f"{new_id()}/tokens"):
        assert (await console.get(f"/calls/{path}")).status == 404


HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</title></bdi></pre><svg onload=alert(1)>",
    "{{ 7 * 7 }}",
    "\u202egnp.exe\u2066 \x00\x1b[31m \ud800",
    "a\u0300" * 2000,
    "\x07\u200b" * 500_000,
    "<" * 1_000_000,
)


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
async def test_hostile_text_is_shown_as_text_on_a_page_of_bounded_size(
    engine: AsyncEngine, console: Pages, text: str
) -> None:
    name = "".join(one for one in text if one.isprintable())[:60] or "unseen"
    calls = []
    said: list[dict[str, Any]] = [{"role": text[:99], "content": text[:9000]} for _ in range(60)]
    for _ in range(3):
        said.append({"role": "tool", "tool_call_id": text, "content": [{"type": text}]})
        function = {"name": text, "arguments": text}
        reply = {"role": "assistant", "content": text, "reasoning": text}
        reply |= {"tool_calls": [{"id": "t", "type": "function", "function": function}]}
        calls.append(chat_call(name, said, reply, task=name, agent=name, finish=name, **ago(9)))
        text = text[:1000]
    await store(engine, *calls, statement(name, name, episode=name))
    [episode] = await episodes(engine)
    for path in (
        f"/episodes/{episode.id}",
        f"/episodes?task={quote(name)}",
        f"/calls/{episode.calls[0].id}/tokens",
    ):
        page = await console.get(path)
        body = page.body.decode()
        assert page.status == 200
        assert len(page.body) <= 2_000_000
        assert not re.search(r"<(script>|img|svg onload)|[\x00\x1b\x07\u202e\u2066\u200b]", body)


async def test_busy_episode_is_shown_on_a_page_of_bounded_size(
    engine: AsyncEngine, console: Pages
) -> None:
    parts = [{"role": "user", "content": [{}] * 9000}]
    made = call("busy", task="t", request=json.dumps({"messages": parts}).encode(), **ago(200))
    calls = [
        call(
            "busy",
            task="t",
            tool_calls=tuple(
                ToolCall(id=f"{n}.{one}", name="x", arguments="") for one in range(25)
            ),
            tool_events=tuple(tool_event("error", f"{n - 1}.{one}") for one in range(25) if n),
            **ago(100 - n / 10),
        )
        for n in range(90)
    ]
    said = [reward(n / 1000, at=n, episode="busy") for n in range(900)]
    await store(engine, made, *calls, *said)
    [episode] = await episodes(engine)
    page = await console.get(f"/episodes/{episode.id}")
    body = page.body.decode()
    assert page.status == 200
    assert len(page.body) <= 700_000
    for more in (
        "what follows is not shown",
        "600 earlier statements",
        "5 more",
    ):
        assert more in body


async def test_recorded_requests_are_parsed_off_the_consoles_event_loop(
    engine: AsyncEngine, console: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store(engine, *attempt("a", "t", 3, 1.0, 1), *attempt("b", "t", 3, 0.0, 2))
    threads: list[str] = []
    parse_object = conversation.parse_object

    def parsed(body: bytes) -> Any:
        threads.append(threading.current_thread().name)
        return parse_object(body)

    monkeypatch.setattr(conversation, "parse_object", parsed)
    for path in ("/episodes?task=t", f"/episodes/{(await ids(engine))['a']}"):
        before = len(threads)
        assert (await console.get(path)).status == 200
        assert len(threads) > before
    assert threading.main_thread().name not in threads


async def test_episode_is_visible_to_its_own_tenant_only(
    engine: AsyncEngine, open_console: OpenConsole
) -> None:
    own = scoped("own", "e1")
    await store(engine, made := call(own, task=scoped("own", "t")), reward(1.0, episode=own))
    [episode] = await episodes(engine)
    paths = (
        f"/episodes/{episode.id}",
        f"/calls/{made.id}/tokens",
        f"/calls/{made.id}/request",
    )
    await train(
        engine,
        Recipe.model_validate(
            {"claim": {"group_size": 1, "groups": 1}, "credit": {"baseline": "none"}}
        ),
    )
    async with engine.connect() as connection:
        update = await connection.scalar(sqlalchemy.text("SELECT id FROM updates"))
    for tenant, expected in (("own", 200), ("other", 404), ("default", 404)):
        key = bearer(await key_of(engine, tenant, "read"))
        async with open_console() as console:
            assert [(await console.get(path, key)).status for path in paths] == [expected] * 3
            for query in (f"task={quote(scoped('own', 't'))}", f"episode={episode.id}"):
                page = await console.get(f"/updates/{update}/credit?{query}", key)
                why = "gave no credit here" if tenant == "default" else f"is no update {update}"
                assert why in page.body.decode()


def test_console_computes_credit_without_torch() -> None:
    code = "import sys, console.app; print({'torch', 'transformers'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "set()\n"
