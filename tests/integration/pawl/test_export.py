"""`pawl export`: the format of the contract, oldest first, filtered."""

import io
import json
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from benchmarks.stack import free_port
from pawl.export import export, hold_out
from store import claims
from store.errors import Damaged, StoreError
from store.records import SpoolRecord, ToolCall
from store.selecting import Selection, select_episodes
from store.version_states import ensure_base
from tests.integration.conftest import Pawl
from tests.support.ledger.episodes import ingest
from tests.support.records import call, reward, tool_event

CALL_KEYS = {
    *("call", "agent", "policy", "request", "reply", "prompt_ids", "sampled_ids"),
    *("sampled_logprobs", "sampling", "trainable", "reason", "tool_events", "feedback"),
}
NOW = datetime.now(UTC)


async def exported(engine: AsyncEngine, write: Any = export, **chosen: Any) -> list[dict[str, Any]]:
    out = io.BytesIO()
    count = await write(engine, Selection(**chosen), out)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert count == len(lines)
    return lines


@pytest.fixture
async def filled(engine: AsyncEngine) -> AsyncEngine:
    asked = (ToolCall(id="t1", name="calc", arguments="{}"),)
    records: list[SpoolRecord] = [
        call("scored", tool_calls=asked, policy_version=3, task="t"),
        call("scored", tool_events=(tool_event("error", "t1"),), agent="checker"),
        reward(0.5, episode="scored"),
        call("failed", http_status=400, trainable=False, reason="incomplete"),
        call("open"),
        call("quiet", started_at=NOW - timedelta(hours=1), policy=None, policy_version=None),
        call("raw", request=None, request_raw=b"{", reply=None, reply_raw=b"<html>"),
        call("raw", tool_events=(tool_event("ok", "nobody asked"),)),
    ]
    async with engine.begin() as connection:
        await ingest(connection, records)
    return engine


async def test_export_has_a_line_for_each_episode_oldest_first(filled: AsyncEngine) -> None:
    lines = await exported(filled)
    assert [line["episode"] for line in lines] == ["scored", "failed", "open", "quiet", "raw"]
    states = [line["state"] for line in lines[:4]]
    assert states == ["scored", "failed", "open", "unscored"]


async def test_export_line_has_the_documented_fields(filled: AsyncEngine) -> None:
    line = (await exported(filled))[0]
    assert set(line) == {"episode", "task", "split", "state", "fates", "feedback", "calls"}
    assert line["feedback"][0]["metric"] == "reward"
    assert set(line["calls"][0]) == CALL_KEYS
    first, second = line["calls"]
    assert first["policy"] == "m@3"
    assert first["request"] == {"model": "m"}
    assert first["prompt_ids"] == [1, 2, 3]
    assert first["sampled_logprobs"] == [-1.0, -1.0]
    assert first["tool_events"] == [
        {"id": "t1", "name": "tool", "status": "error", "arguments": "{}"}
    ]
    assert (second["agent"], second["tool_events"]) == ("checker", [])
    stray = [line.get("stray_tool_events") for line in await exported(filled)]
    told = [{"id": "nobody asked", "name": "tool", "status": "ok"}]
    assert stray == [None, None, None, None, told]


async def test_export_line_has_the_episodes_fate_for_each_policy(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
        tasks = {"solved": 1.0, "unsolved": 0.0, "waits": 1.0}
        for key, value in tasks.items():
            await ingest(connection, [call(key, task=key[-6:]), reward(value, episode=key)])
        await ingest(connection, [call("unpaid"), call("work", policy=None, policy_version=None)])
        solved, unsolved, *_ = await select_episodes(connection)
        update = await claims.begin_update(connection, "m", 0, {})
        await connection.execute(
            text("UPDATE episode_policies SET claimed_by = :update WHERE episode_id = ANY(:ids)"),
            {"update": update, "ids": [solved, unsolved]},
        )
        outcomes = (
            claims.Outcome(episode_id=solved, trained=True),
            claims.Outcome(episode_id=unsolved, trained=False, reason="too_long"),
        )
        made = {"version": 1, "adapter_path": "/gone"}
        await claims.record_update(connection, update, outcomes, {}, policy="m", **made)
    fates = {line["episode"]: line.get("fates") for line in await exported(engine)}
    spent = {"policy": "m", "update": str(update)}
    assert fates == {
        "solved": [spent | {"state": "trained"}],
        "unsolved": [spent | {"state": "untrained", "reason": "too_long"}],
        "waits": [{"policy": "m", "state": "scored"}],
        "unpaid": [{"policy": "m", "state": "open"}],
        "work": None,
    }


async def test_exported_episodes_are_chosen_by_agent_policy_and_time(filled: AsyncEngine) -> None:
    assert [e["episode"] for e in await exported(filled, agent="checker")] == ["scored"]
    assert len(await exported(filled, policy="m")) == 4
    recent = await exported(filled, since=NOW - timedelta(minutes=1))
    assert "quiet" not in [line["episode"] for line in recent]


async def test_export_line_has_the_episodes_split(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await ingest(connection, [call("t"), call("e"), call("e", split="eval")])
    lines = await exported(engine)
    assert {line["episode"]: line["split"] for line in lines} == {"t": "train", "e": "eval"}


def asking(episode: str, question: str, **said: Any) -> SpoolRecord:
    request = json.dumps({"model": "m", "messages": [{"role": "user", "content": question}]})
    return call(episode, request=request.encode(), **said)


async def test_option_hold_out_writes_tasks_and_makes_their_episodes_evaluation(
    engine: AsyncEngine,
) -> None:
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
        records = [
            asking("a1", "What is 1?", task="a", policy_version=0),
            asking("a2", "What is 1?", task="a", policy_version=0),
            *(asking(f"b{n}", f"What is {n}0?", task=f"b{n}", policy_version=0) for n in range(3)),
            call("no text", task="c"),
        ]
        rewards = [reward(1.0, episode=one) for one in ("a1", "a2", "b0", "b1", "b2")]
        await ingest(connection, [*records, *rewards])
    tasks = await exported(engine, partial(hold_out, most=2))
    assert len(tasks) == 2
    assert all(set(task) == {"id", "question"} for task in tasks)
    held = {task["id"] for task in tasks}
    for line in await exported(engine):
        assert line["split"] == ("eval" if line["task"] in held else "train")
    async with engine.connect() as connection:
        query = "SELECT task FROM episode_policies WHERE claimable"
        claimable = set((await connection.execute(text(query))).scalars())
    assert claimable == {"a", "b0", "b1", "b2", "c"} - held
    rest = await exported(engine, partial(hold_out, most=9))
    assert {task["id"] for task in rest} == {"a", "b0", "b1", "b2"} - held
    with pytest.raises(StoreError, match="no task can be held out"):
        await exported(engine, partial(hold_out, most=9))


async def test_export_without_a_database_leaves_the_earlier_file(
    pawl: Pawl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "episodes.jsonl"
    out.write_text("earlier\n")
    monkeypatch.setenv("DATABASE_URL", f"postgresql://postgres@127.0.0.1:{free_port()}/none")
    assert isinstance((await pawl("export", "--out", str(out))).exception, OSError)
    assert out.read_text() == "earlier\n"
    assert list(tmp_path.glob("*.new")) == []


async def test_damaged_episode_does_not_keep_the_others_from_the_export(
    pawl: Pawl, filled: AsyncEngine, tmp_path: Path
) -> None:
    async with filled.begin() as connection:
        broken = "UPDATE transitions SET sampled_ids = '\\x00' WHERE episode_id ="
        await connection.execute(text(f"{broken} (SELECT id FROM episodes WHERE key = 'scored')"))
    out = tmp_path / "episodes.jsonl"
    assert isinstance((await pawl("export", "--out", str(out))).exception, Damaged)
    assert len(out.read_text().splitlines()) == 4
