"""What a reader of the ledger cannot read is the damage of one episode, whatever it is."""

import io
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from benchmarks.stack import free_port
from pawl.export import export
from pawl.judging.answers import Judge
from pawl.judging.rubric import RubricJudge
from pawl.judging.run import Judging, JudgingPlan
from store.errors import Damaged
from store.read.episodes import read_undamaged
from store.records import SpoolRecord
from store.selecting import Selection, select_episodes
from store.version_states import ensure_base
from tests.integration.pawl.judging.test_judge import Bench as Program
from tests.integration.pawl.judging.test_judge import Desk, Opinion, outcomes
from tests.integration.store.test_damage import Threads
from tests.support.ledger.episodes import reasons, store
from tests.support.records import call, reward, tokens
from tests.support.servers.fake_server import fake_model_server
from trainer.credit.lines import read_lines

PLAN = JudgingPlan(quiet=timedelta(0), poll_s=0.05)
DEEP = b'{"a":' * 490 + b"[" * 489 + b"]" * 489 + b"}" * 490
NAN, MINUS_INFINITY = float("nan"), float("-inf")
# Calls as an earlier Pawl may have stored them; and whether the trainer can do without the text.
UNREADABLE: dict[str, dict[str, Any]] = {
    "a nested stop": {
        "request": b'{"model":"m","stop":' + DEEP + b"}",
        "sampling": b'{"temperature":1.0,"stop":' + DEEP + b"}",
    },
    "a NaN": {"tokens": tokens([1, 2, 3], [4, 5], NAN)},
    "an infinity": {"tokens": tokens([1, 2, 3], [4, 5], MINUS_INFINITY)},
    "what vLLM says for an infinity": {"tokens": tokens([1, 2, 3], [4, 5], -9999.0)},
    "a probability past one": {"tokens": tokens([1, 2, 3], [4, 5], 0.5)},
    "no sampled ids": {"tokens": tokens([1, 2, 3], [])},
    "no prompt": {"tokens": tokens([], [1])},
    "a greedy temperature": {"sampling": b'{"temperature":"0"}'},
    "no temperature": {"sampling": b"{}"},
    "a temperature that is none": {"sampling": b'{"temperature":"hot"}'},
    "no settings": {"sampling": b"[]"},
}


# The tasks and members of what can be read.
SOUND = [(task, member) for task in (1, 2) for member in (0, 1)]


def changed(episode: str, task: str, kind: str) -> SpoolRecord:
    return call(episode, task=task, **UNREADABLE[kind])


async def fill(engine: AsyncEngine, kind: str) -> None:
    """Three groups of two; the second member of the first cannot be read."""
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
    for task in range(3):
        for member in range(2):
            episode = f"t{task}-{member}"
            odd = (task, member) == (0, 1)
            made = tokens([1, 2, task], [4 + member])
            record = (
                changed(episode, "t0", kind) if odd else call(episode, task=f"t{task}", tokens=made)
            )
            await store(engine, record, reward(float(member), episode=episode))


@pytest.fixture
async def bench(engine: AsyncEngine, tmp_path: Path) -> AsyncIterator[Threads]:
    async with fake_model_server() as server:
        yield Threads(engine, server, tmp_path)


async def fill_with_all(engine: AsyncEngine) -> None:
    """Store a group of two for each kind, whose second member is of it, and two sound groups."""
    for kind in UNREADABLE:
        sound = call(f"{kind}-0", task=kind)
        rewards = [reward(float(member), episode=f"{kind}-{member}") for member in range(2)]
        await store(engine, sound, changed(f"{kind}-1", kind, kind), *rewards)
    for task, member in SOUND:
        made = tokens([1, 2, task], [4 + member])
        episode = f"t{task}-{member}"
        record = call(episode, task=f"t{task}", tokens=made)
        await store(engine, record, reward(float(member), episode=episode))


async def test_trainer_consumes_the_unreadable_episodes_and_trains_the_others(
    bench: Threads,
) -> None:
    await fill_with_all(bench.engine)
    bench.change("claim", groups=1)
    while await bench.run_once():
        pass
    trained = {f"t{task}-{member}": None for task, member in SOUND}
    damaged = {f"{kind}-1": "damaged" for kind in UNREADABLE}
    assert await reasons(bench.engine) == trained | damaged


async def test_export_has_all_episodes_but_the_unreadable(engine: AsyncEngine) -> None:
    await fill_with_all(engine)
    out = io.BytesIO()
    with pytest.raises(Damaged) as told:
        await export(engine, Selection(), out)
    *_, last = told.value.args[0].splitlines()
    for kind in UNREADABLE:
        assert f"'{kind}-1' cannot be " in str(told.value)
    sound = {f"{kind}-0" for kind in UNREADABLE} | {f"t{task}-{member}" for task, member in SOUND}
    assert last.endswith(f"; the other {len(sound)} episodes are written")
    lines = read_lines(io.BytesIO(out.getvalue()), "the export")
    assert sorted(line.episode for line in lines) == sorted(sound)


TEXTS = {
    "nested": b'{"messages":' + DEEP + b"}",
    "cut": b'{"messages":["a"',
    "not UTF-8": b'{"messages":["\xff"]}',
    "two lines": b'{"a":"\n"}',
    "a number that is none": b'{"a":01}',
}


async def test_episodes_with_invalid_json_are_not_exported_and_may_be_trained(
    bench: Threads,
) -> None:
    await fill(bench.engine, "a nested stop")
    odd = [(kind, part) for kind in TEXTS for part in ("request", "reply")]
    for kind, part in odd:
        record: Any = {part: TEXTS[kind]}
        key = f"{kind}, {part}"
        await store(bench.engine, call(key, task="t1", **record), reward(0.5, episode=key))
    out = io.BytesIO()
    with pytest.raises(Damaged) as told:
        await export(bench.engine, Selection(), out)
    for kind, part in odd:
        said = f"'{kind}, {part}' cannot be read back: the {part} of call"
        assert said in str(told.value)
    assert len(out.getvalue().splitlines()) == 5
    # The trainer reads no text.
    assert await bench.run_once()
    spent = await reasons(bench.engine)
    assert {spent.get(f"{kind}, {part}") for kind, part in odd} == {None}


async def unscored(engine: AsyncEngine, kind: str) -> None:
    for episode in ("a", "b", "c"):
        record = changed("b", "t", kind) if episode == "b" else call(episode, task="t")
        await store(engine, record)


async def judged(engine: AsyncEngine, judge: Judge) -> Desk:
    desk = Desk()
    await Judging(engine, judge, desk, PLAN).run(once=True)
    found = await outcomes(engine)
    assert {key: outcome for key, (outcome, _, _) in found.items()} == {
        "a": "judged",
        "b": "failed",
        "c": "judged",
    }
    assert "cannot be read back" in (found["b"][2] or "")
    return desk


@pytest.mark.parametrize("kind", ["a nested stop", "no settings"])
async def test_judge_is_asked_once_about_each_readable_episode(
    engine: AsyncEngine, kind: str
) -> None:
    await unscored(engine, kind)
    judge = Opinion()
    await judged(engine, judge)
    # Several are judged at once: in any order, and each once.
    assert sorted(judge.asked) == ["a", "c"]
    query = text("SELECT count(*) FROM judgements WHERE due_at IS NOT NULL")
    async with engine.connect() as connection:
        assert await connection.scalar(query) == 0


async def test_judge_program_sees_no_line_that_a_request_forged(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    forged = b'{"messages":\n[]}\r\n{"episode":"forged",\r"feedback":[]}'
    pretty = b'{\r\n "messages": [\n {"role": "user",\r "content": "a\\nb"} ]}'
    await store(engine, call("good-a", request=pretty), call("good-b", request=forged))
    program = Program(tmp_path)
    await Judging(engine, program.judge, Desk(), PLAN).run(once=True)
    assert program.asked == ["good-a"]
    assert (await outcomes(engine))["good-b"][0] == "failed"


async def test_judge_model_is_asked_about_each_readable_episode(engine: AsyncEngine) -> None:
    asked: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        said = {"message": {"role": "assistant", "content": '{"score": 0.5}'}}
        return web.json_response({"choices": [said]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await unscored(engine, "a nested stop")
    async with aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{port}/v1"
        judge = RubricJudge(
            session, base_url=url, model="j", rubric="r", timeout_s=5, max_chars=1000
        )
        await judged(engine, judge)
    await runner.cleanup()
    assert len(asked) == 2


async def read_all(engine: AsyncEngine) -> tuple[dict[str, Any], list[str]]:
    async with engine.connect() as connection:
        found = await read_undamaged(connection, await select_episodes(connection))
    return {episode.key: episode for episode in found.episodes}, list(found.damaged.values())
