"""Any corruption of a stored row is one episode's own, and a line of an export is one document."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.export import export
from store.errors import Damaged
from store.records import ToolCall
from store.selecting import Selection
from store.values.packing import pack_logprobs
from tests.integration.store.test_damage import Threads, damage
from tests.integration.store.test_unreadable import DEEP, NAN, bench, fill, read_all
from tests.support.ledger.episodes import store
from tests.support.ledger.shared_database import shared_database
from tests.support.records import call
from tests.support.servers.fake_server import FakeModelServer
from trainer.credit.lines import read_lines

__all__ = ["bench"]


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


async def exported(engine: AsyncEngine) -> list[str]:
    out = io.BytesIO()
    try:
        await export(engine, Selection(), out)
    except Damaged as error:
        assert "'t0-1' cannot be read back" in str(error)  # noqa: PT017
        assert "the other 3 episodes are written" in str(error)  # noqa: PT017
    return [line.episode for line in read_lines(io.BytesIO(out.getvalue()), "the export")]


@pytest.mark.timeout(300)
def test_any_corruption_of_a_row_damages_only_its_episode(database_url: str) -> None:
    """Read or damaged, and nothing else; the others are read as they were."""
    with shared_database(database_url) as shared:
        before = shared.run(prepare(shared.engine))

        @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(st.lists(st.tuples(CORRUPTION, st.booleans()), min_size=1, max_size=2))
        def holds(damages: list[tuple[tuple[str, str, int, bytes], bool]]) -> None:
            shared.run(only_one_is_damaged(shared.engine, damages, before))

        holds()


async def prepare(engine: AsyncEngine) -> dict[str, Any]:
    """Fill the ledger, keep its rows, and return what is read of it."""
    await Threads(engine, FakeModelServer(), Path()).fill()
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE kept AS SELECT * FROM transitions"))
    found, damaged = await read_all(engine)
    assert not damaged
    return found


async def only_one_is_damaged(
    engine: AsyncEngine,
    damages: list[tuple[tuple[str, str, int, bytes], bool]],
    before: dict[str, Any],
) -> None:
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


async def test_nan_in_feedback_damages_its_episode(engine: AsyncEngine) -> None:
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


async def test_call_that_is_a_retry_of_itself_damages_its_episode(engine: AsyncEngine) -> None:
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
def test_each_line_of_an_export_is_a_json_document(database_url: str) -> None:
    """Whatever a body is: one line an episode, its own, or a message that names it."""
    with shared_database(database_url) as shared:

        @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(st.lists(st.tuples(BODIES, BODIES), min_size=1, max_size=3))
        def holds(bodies: list[tuple[bytes, bytes]]) -> None:
            shared.run(each_is_one_line(shared.engine, bodies))

        holds()


async def each_is_one_line(engine: AsyncEngine, bodies: list[tuple[bytes, bytes]]) -> None:
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


async def test_export_keeps_numbers_and_strings_as_written(engine: AsyncEngine) -> None:
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
