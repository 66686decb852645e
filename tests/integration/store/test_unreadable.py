"""What a reader of the ledger cannot read is the damage of one episode, whatever it is."""

import asyncio
import io
import json
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.export import Selection, export
from pawl.judging.answers import Judge
from pawl.judging.model import JudgingModel, RubricJudge
from pawl.judging.run import Judging, JudgingPlan
from store.connection.engine import make_engine
from store.errors import Damaged
from store.read.episodes import episode_ids, read
from store.records import SpoolRecord, ToolCall
from store.updates.policies import ensure_base
from store.values.tokens import pack_logprobs
from tests.integration.conftest import free_port
from tests.integration.pawl.test_judge import Bench as Program
from tests.integration.pawl.test_judge import Desk, Opinion, outcomes
from tests.integration.store.test_damage import Threads, damage
from tests.integration.store.test_groups import reasons, store
from tests.integration.trainer.test_recovery import run_once
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


@pytest.mark.parametrize("kind", UNREADABLE)
async def test_the_trainer_spends_it_and_goes_on(bench: Threads, kind: str) -> None:
    await fill(bench.engine, kind)
    assert await run_once(bench)
    trained = {f"t{task}-{member}": None for task in (1, 2) for member in (0, 1)}
    assert await reasons(bench.engine) == trained | {"t0-1": "damaged"}


@pytest.mark.parametrize("kind", UNREADABLE)
async def test_an_export_has_all_others(engine: AsyncEngine, kind: str) -> None:
    await fill(engine, kind)
    out = io.BytesIO()
    with pytest.raises(Damaged, match=r"'t0-1' cannot be .* the other 5 episodes are written"):
        await export(engine, Selection(), out)
    lines = read_lines(io.BytesIO(out.getvalue()), "the export")
    assert sorted(line.episode for line in lines) == ["t0-0", "t1-0", "t1-1", "t2-0", "t2-1"]


TEXTS = {
    "nested": b'{"messages":' + DEEP + b"}",
    "cut": b'{"messages":["a"',
    "not UTF-8": b'{"messages":["\xff"]}',
    "two lines": b'{"a":"\n"}',
    "a number that is none": b'{"a":01}',
}


@pytest.mark.parametrize("part", ["request", "reply"])
@pytest.mark.parametrize("kind", TEXTS)
async def test_texts_that_are_no_document_are_exported_by_nobody(
    bench: Threads, kind: str, part: str
) -> None:
    await fill(bench.engine, "a nested stop")
    record: Any = {part: TEXTS[kind]}
    await store(bench.engine, call("odd", task="t1", **record), reward(0.5, episode="odd"))
    out = io.BytesIO()
    with pytest.raises(Damaged, match=f"'odd' cannot be read back: the {part} of call"):
        await export(bench.engine, Selection(), out)
    assert len(out.getvalue().splitlines()) == 5
    # The trainer reads no text.
    assert await run_once(bench)
    assert (await reasons(bench.engine)).get("odd", "not yet") in (None, "not yet")


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
async def test_a_judge_is_asked_about_all_others_and_not_again(
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


async def test_a_program_is_shown_one_line(engine: AsyncEngine, tmp_path: Path) -> None:
    forged = b'{"messages":\n[]}\r\n{"episode":"forged",\r"feedback":[]}'
    pretty = b'{\r\n "messages": [\n {"role": "user",\r "content": "a\\nb"} ]}'
    await store(engine, call("good-a", request=pretty), call("good-b", request=forged))
    program = Program(tmp_path)
    await Judging(engine, program.judge, Desk(), PLAN).run(once=True)
    assert program.asked == ["good-a"]
    assert (await outcomes(engine))["good-b"][0] == "failed"


async def test_a_model_judges_all_others(engine: AsyncEngine) -> None:
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
        model = JudgingModel(base_url=url, name="j")
        judge = RubricJudge(session, model, rubric="r", timeout_s=5, max_chars=1000)
        await judged(engine, judge)
    await runner.cleanup()
    assert len(asked) == 2


# Any damage


COLUMNS = ("request", "reply", "prompt_ids", "sampled_ids", "sampled_logprobs")
CORRUPTION = st.one_of(
    st.tuples(
        st.sampled_from(COLUMNS),
        st.sampled_from(["cut", "flip", "replace", "none"]),
        st.integers(min_value=0, max_value=2000),
        st.one_of(st.binary(max_size=40), st.just(DEEP), st.just(pack_logprobs([NAN]))),
    ),
    st.tuples(
        st.sampled_from(["sampling", "tool_calls"]),
        st.just("json"),
        st.just(0),
        st.recursive(
            st.none()
            | st.booleans()
            | st.floats(allow_nan=False, allow_infinity=False)  # PostgreSQL refuses both
            | st.text(max_size=3),
            lambda inner: (
                st.lists(inner, max_size=2)
                | st.dictionaries(
                    st.sampled_from(["temperature", "id", "name", "arguments"]), inner
                )
            ),
            max_leaves=5,
        ).map(lambda value: json.dumps(value).replace("\\u0000", "").encode()),
    ),
    st.tuples(
        st.sampled_from(["request_prefix", "request_suffix", "prompt_prefix"]),
        st.just("number"),
        st.integers(min_value=-(2**31), max_value=2**31 - 1),
        st.just(b""),
    ),
    st.tuples(
        st.sampled_from(["parent_id", "retry_of"]), st.just("itself"), st.just(0), st.just(b"")
    ),
)


def assignment(column: str, how: str, place: int, data: bytes) -> str:
    """The column's new value, in SQL, of the row's old one and :data."""
    begin = f"substr({column}, 1, {place} % (1 + length({column})))"
    end = f"substr({column}, 2 + {place} % (1 + length({column})))"
    return {
        "cut": f"{begin}",
        "flip": f"{begin} || CAST(:data AS bytea) || {end}",
        "replace": "CAST(:data AS bytea)",
        "none": "NULL" if column in ("request", "reply") else "''::bytea",
        "json": "convert_from(CAST(:data AS bytea), 'UTF8')::json",
        "number": f"{place}",
        "itself": "id",
    }[how]


async def corrupt(engine: AsyncEngine, damage: tuple[str, str, int, bytes], newest: bool) -> None:
    column, how, place, data = damage
    which = "last_call_id" if newest else "first_call_id"
    query = (
        f"UPDATE transitions SET {column} = {assignment(column, how, place, data)}"
        f" WHERE id = (SELECT {which} FROM episodes WHERE key = 't0-1')"
    )
    values = {"data": data} if ":data" in query else {}
    async with engine.begin() as connection:
        await connection.execute(text(query), values)


async def read_all(engine: AsyncEngine) -> tuple[dict[str, Any], list[str]]:
    async with engine.connect() as connection:
        found = await read(connection, await episode_ids(connection))
    return {episode.key: episode for episode in found.episodes}, list(found.damaged.values())


async def exported(engine: AsyncEngine) -> list[str]:
    out = io.BytesIO()
    try:
        await export(engine, Selection(), out)
    except Damaged as error:
        assert "'t0-1' cannot be read back" in str(error)  # noqa: PT017
        assert "the other 3 episodes are written" in str(error)  # noqa: PT017
    return [line.episode for line in read_lines(io.BytesIO(out.getvalue()), "the export")]


@pytest.mark.timeout(300)
def test_any_corruption_of_a_row_is_one_episodes_own(database_url: str) -> None:
    """Read or damaged, and nothing else; the others are read as they were."""

    async def prepare() -> dict[str, Any]:
        engine = make_engine(database_url)
        bench = Threads(engine, None, Path())  # type: ignore[arg-type]
        await bench.fill()
        async with engine.begin() as connection:
            await connection.execute(text("CREATE TABLE kept AS SELECT * FROM transitions"))
        found, damaged = await read_all(engine)
        assert not damaged
        await engine.dispose()
        return found

    before = asyncio.run(prepare())

    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(st.tuples(CORRUPTION, st.booleans()), min_size=1, max_size=2))
    def holds(damages: list[tuple[tuple[str, str, int, bytes], bool]]) -> None:
        async def run() -> None:
            engine = make_engine(database_url)
            try:
                for one, newest in damages:
                    await corrupt(engine, one, newest)
                found, damaged = await read_all(engine)
                others = set(before) - {"t0-1"}
                assert {key: found[key] for key in others} == {key: before[key] for key in others}
                assert ("t0-1" in found) + len(damaged) == 1
                assert others <= set(await exported(engine)) <= set(before)
            finally:
                async with engine.begin() as connection:
                    await connection.execute(text("DELETE FROM transitions"))
                    await connection.execute(text("INSERT INTO transitions SELECT * FROM kept"))
                await engine.dispose()

        asyncio.run(run())

    holds()


async def test_a_statement_of_no_number_is_damage(engine: AsyncEngine) -> None:
    await fill(engine, "a nested stop")
    async with engine.begin() as connection:
        await connection.execute(
            text(
                "UPDATE feedback SET value = 'NaN' WHERE episode_id ="
                " (SELECT id FROM episodes WHERE key = 't1-1')"
            )
        )
    found, damaged = await read_all(engine)
    assert len(damaged) == 2
    assert "t1-0" in found


async def test_a_call_that_repeats_itself_is_damage(engine: AsyncEngine) -> None:
    await fill(engine, "a nested stop")
    await damage(engine, "t1-0", "retry_of = id")
    found, damaged = await read_all(engine)
    assert set(found) == {"t0-0", "t1-1", "t2-0", "t2-1"}
    assert len(damaged) == 2


# Export's lines


BODIES = st.one_of(
    st.binary(max_size=60),
    st.text(max_size=40).map(str.encode),
    st.sampled_from(
        [
            b'{"a":1}\n{"episode":"forged","state":"scored","feedback":[],"calls":[]}',
            b'{"a":\n"x",\r\n"b":[1.10,1e400,-0.0,' + b"9" * 50 + b"]}",
            '{"a":"\u2028\u2029\u0085"}'.encode(),
            b'{"a":"\\ud800"}',
            b'{"a":"\\u0000","a":1}',
            b'{"a":"\x00"}',
            DEEP,
            b"\n",
            b"",
        ]
    ),
    st.recursive(
        st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=4),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=6,
    ).map(lambda value: json.dumps(value, indent=2, ensure_ascii=False).encode()),
)


@pytest.mark.timeout(300)
def test_each_line_of_an_export_is_one_document(database_url: str) -> None:
    """Whatever a body is: one line an episode, its own, or a message that names it."""

    async def run(bodies: list[tuple[bytes, bytes]]) -> None:
        engine = make_engine(database_url)
        try:
            for number, (request, reply) in enumerate(bodies):
                await store(engine, call(f"e{number}", request=request, reply=reply))
            out = io.BytesIO()
            told = ""
            try:
                await export(engine, Selection(), out)
            except Damaged as error:
                told = "; ".join(error.episodes.values())
            lines = out.getvalue().split(b"\n")
            assert lines.pop() == b""
            assert not any(b"\r" in line for line in lines)
            keys = [json.loads(line)["episode"] for line in lines]
            assert sorted(keys) == sorted(set(keys))
            for number in range(len(bodies)):
                assert (f"e{number}" in keys) != (f"'e{number}'" in told)
            assert len(read_lines(io.BytesIO(out.getvalue()), "the export")) == len(lines)
        finally:
            async with engine.begin() as connection:
                await connection.execute(text("TRUNCATE transitions, episodes CASCADE"))
            await engine.dispose()

    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(st.tuples(BODIES, BODIES), min_size=1, max_size=3))
    def holds(bodies: list[tuple[bytes, bytes]]) -> None:
        asyncio.run(run(bodies))

    holds()


async def test_an_export_leaves_numbers_and_strings_alone(engine: AsyncEngine) -> None:
    said = b'{ "a" : [ 1e400, 1.10,\n-0.0, ' + b"9" * 50 + b', "\\u0041\\/" ], "a": 1 }\n'
    await store(
        engine,
        call(
            "e",
            request=said,
            reply=said,
            tool_calls=(ToolCall(id="t", name="n", arguments="{\n}"),),
        ),
    )
    out = io.BytesIO()
    assert await export(engine, Selection(), out) == 1
    assert out.getvalue().count(b"\n") == 1
    kept = b'{"a":[1e400,1.10,-0.0,' + b"9" * 50 + b',"\\u0041\\/"],"a":1}'
    assert out.getvalue().count(kept) == 2
