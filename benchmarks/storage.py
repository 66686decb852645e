"""Measure what a call costs to keep, in bytes and in time.

Bytes: an agent with tools makes 40 calls, each repeating all before; what its rows take in
PostgreSQL (table and TOAST; the indexes apart) against its plain JSON: the request and reply
bodies as they were sent, without token ids. Time: batches of calls with 4 KB prompts and
2.9 KB replies, every call an episode of its own, on one core with PostgreSQL.
"""

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from benchmarks.proxy import wire
from proxy.ingester.transcribe import question_of, record_of
from proxy.spool.segments import CapturedCall, encode_frame, read_frames
from store.connection.engine import make_engine
from store.embedded import EmbeddedPostgres
from store.ids import new_id
from store.records import CallRecord, Tokens, ToolCall
from store.schema.migrate import upgrade
from store.values.digests import PREFIX
from store.values.tokens import pack_ids, pack_logprobs
from store.write.ingest import Ingester

TURNS = 40
WORDS = Path(__file__).read_text().split() + (__doc__ or "").split()
BYTES_PER_TOKEN = 4
VOCABULARY = 150_000


def prose(length: int, dice: random.Random) -> str:
    """Write words, about as compressible as a prompt is."""
    words: list[str] = []
    size = 0
    while size < length:
        word = dice.choice(WORDS) + str(dice.randrange(100))
        words.append(word)
        size += len(word) + 1
    return " ".join(words)[:length]


def some_ids(count: int, dice: random.Random) -> list[int]:
    """Return token ids of a model of today."""
    return [dice.randrange(VOCABULARY) for _ in range(count)]


def record(
    request: bytes,
    reply: bytes,
    tokens: Tokens,
    *,
    episode: str | None = None,
    tool_calls: tuple[ToolCall, ...] = (),
) -> CallRecord:
    """Make a complete call, as the proxy records it."""
    call_id = new_id()
    provided = bytes([PREFIX]) + sha256(reply + call_id.bytes).digest()[:15]
    return CallRecord(
        id=call_id,
        episode=episode or str(call_id),
        method="header" if episode else "own",
        agent="default",
        task=None,
        dialect="chat",
        policy="m",
        policy_version=0,
        served_model="m",
        status="complete",
        http_status=200,
        stream=False,
        request=request,
        request_raw=None,
        reply=reply,
        reply_raw=None,
        response_id=f"chatcmpl-{call_id.hex}",
        tokens=tokens,
        sampling=b'{"temperature":1.0,"top_p":1.0,"top_k":0}',
        trainable=True,
        reason=None,
        tool_calls=tool_calls,
        tool_events=(),
        usage=b'{"prompt_tokens":200,"completion_tokens":20,"total_tokens":220}',
        finish="stop",
        started_at=datetime.now(UTC),
        first_chunk_ms=120.5,
        total_ms=800.25,
        retry=0,
        provides=(provided,),
    )


def single_call(dice: random.Random) -> bytes:
    """Make what a worker spools of a question of 4 KB (200 ids), a reply of 2.9 KB with 20 ids."""
    call_id = new_id()
    captured = CapturedCall(
        id=call_id.bytes,
        episode=str(call_id),
        method="own",
        confidence="certain",
        agent="default",
        task=None,
        dialect="chat",
        policy="m",
        policy_version=0,
        served_model="m",
        wanted_ids=True,
        status="complete",
        http_status=200,
        streamed=False,
        request=_json({"model": "m", "messages": [{"role": "user", "content": prose(4000, dice)}]}),
        reply=wire.reply(20).encode(),
        deflated=False,
        provides=(bytes((PREFIX,)) + dice.randbytes(15),),
        needs=(),
        retry_of=None,
        retry=0,
        tool_events=(),
        default_temperature=1.0,
        started_at=time.time(),
        first_chunk_ms=None,
        total_ms=1.0,
    )
    [(_, payload)] = read_frames(encode_frame(captured))
    return payload


def _read(payload: bytes) -> CallRecord:
    record = record_of(payload)
    assert isinstance(record, CallRecord)
    return record


def agent_calls(dice: random.Random, turns: int = TURNS) -> list[CallRecord]:
    """Make an agent's run: a system prompt, tools, a tool call each turn, results up to 2 KB."""
    tools = [_tool(number, dice) for number in range(6)]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": prose(1500, dice)},
        {"role": "user", "content": prose(400, dice)},
    ]
    ids = some_ids(4500 // BYTES_PER_TOKEN, dice)
    episode = f"agent-{dice.random()}"
    calls = []
    for _ in range(turns):
        body = {"model": "m", "messages": messages, "tools": tools, "stream": False}
        asked = {"path": f"src/{dice.randrange(1000)}.py", "why": prose(80, dice)}
        call_id = f"call_{dice.randrange(16**24):024x}"
        said = {
            "role": "assistant",
            "content": prose(dice.randrange(50, 300), dice),
            "tool_calls": [_tool_call(call_id, asked)],
        }
        result = prose(dice.randrange(200, 2000), dice)
        sampled = some_ids(len(json.dumps(said)) // BYTES_PER_TOKEN, dice)
        tokens = Tokens(
            prompt_ids=pack_ids(ids),
            sampled_ids=pack_ids(sampled),
            sampled_logprobs=pack_logprobs([-dice.random() for _ in sampled]),
        )
        asked_for = (ToolCall(id=call_id, name="read", arguments=json.dumps(asked)),)
        calls.append(
            record(_json(body), _json(_reply(said)), tokens, episode=episode, tool_calls=asked_for)
        )
        messages += [said, {"role": "tool", "tool_call_id": call_id, "content": result}]
        ids = ids + sampled + some_ids(len(result) // BYTES_PER_TOKEN + 8, dice)
    return calls


def _tool(number: int, dice: random.Random) -> dict[str, Any]:
    field = {"type": "string", "description": prose(60, dice)}
    schema = {"type": "object", "properties": {"path": field, "why": field}, "required": ["path"]}
    function = {"name": f"tool_{number}", "description": prose(150, dice), "parameters": schema}
    return {"type": "function", "function": function}


def _tool_call(call_id: str, arguments: dict[str, str]) -> dict[str, Any]:
    function = {"name": "read", "arguments": json.dumps(arguments)}
    return {"id": call_id, "type": "function", "function": function}


def _reply(message: dict[str, Any]) -> dict[str, Any]:
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "tool_calls"}
    usage = {"prompt_tokens": 1000, "completion_tokens": 80, "total_tokens": 1080}
    return {
        "id": f"chatcmpl-{new_id().hex}",
        "object": "chat.completion",
        "created": 1_795_000_000,
        "model": "m",
        "choices": [choice],
        "usage": usage,
    }


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


@contextmanager
def database(folder: Path) -> Iterator[str]:
    """Run an embedded PostgreSQL of this run's own."""
    postgres = EmbeddedPostgres(folder)
    try:
        yield postgres.ensure_running()
    finally:
        postgres.stop()


def server_seconds(pid: int) -> float:
    """Return the processor time of all of the server's processes."""
    postmaster = psutil.Process(pid)
    total = 0.0
    for process in (postmaster, *postmaster.children(recursive=True)):
        times = process.cpu_times()
        total += times.user + times.system
    return total


async def speed(
    engine: AsyncEngine, pid: int, calls: int, batch: int, dice: random.Random
) -> dict[str, float]:
    """Read and store what was spooled of `calls`, in batches; what a call costs."""
    ingester = Ingester(question_of=question_of)

    async def drain(count: int) -> tuple[float, float, float]:
        payloads = [single_call(dice) for _ in range(count)]
        before = time.perf_counter(), time.process_time(), server_seconds(pid)
        for start in range(0, count, batch):
            some = [record_of(payload) for payload in payloads[start : start + batch]]
            await ingester.store(engine, some)
        after = time.perf_counter(), time.process_time(), server_seconds(pid)
        wall, python, server = (b - a for a, b in zip(before, after, strict=True))
        return wall, python, server

    await drain(4 * batch)
    wall, python, server = await drain(calls)
    return {
        "calls_per_s": round(calls / wall),
        "python_us": round(python / calls * 1e6, 1),
        "postgresql_us": round(server / calls * 1e6, 1),
        "cpu_us": round((python + server) / calls * 1e6, 1),
    }


_SIZES = text(
    """
    SELECT sum(pg_table_size(relid)) AS rows, sum(pg_indexes_size(relid)) AS indexes
    FROM (SELECT relid FROM pg_partition_tree('transitions') WHERE isleaf
          UNION ALL SELECT unnest(ARRAY['episodes', 'provided_fingerprints']::regclass[])) tables
    """
)


async def size(engine: AsyncEngine, episodes: Sequence[list[CallRecord]]) -> dict[str, float]:
    """Store them in an empty ledger; what a call takes against its plain JSON."""
    async with engine.begin() as connection:
        await connection.execute(
            text("TRUNCATE transitions, episodes, provided_fingerprints CASCADE")
        )
    ingester = Ingester(question_of=question_of)
    for calls in episodes:
        await ingester.store(engine, calls)
    async with engine.connect() as connection:
        sizes = (await connection.execute(_SIZES)).one()
    count = sum(map(len, episodes))
    plain = sum(len(c.request or b"") + len(c.reply or b"") for calls in episodes for c in calls)
    return {
        "plain_bytes": round(plain / count),
        "row_bytes": round(int(sizes.rows) / count),
        "index_bytes": round(int(sizes.indexes) / count),
        "ratio": round(int(sizes.rows) / plain, 3),
        "ratio_with_indexes": round(int(sizes.rows + sizes.indexes) / plain, 3),
    }


async def measure(calls: int, batch: int, runs: int) -> dict[str, dict[str, float]]:
    """Measure all figures, on one core."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    dice = random.Random(7)
    with tempfile.TemporaryDirectory() as folder, database(Path(folder)) as url:
        await upgrade(url)
        engine = make_engine(url)
        pid = int((Path(folder) / "postgres" / "postmaster.pid").read_text().split()[0])
        found = {"drain": await speed(engine, pid, calls, batch, dice)}
        found[f"agent_{TURNS}_turns"] = await size(engine, [agent_calls(dice) for _ in range(runs)])
        singles = [_read(single_call(dice)) for _ in range(runs * TURNS)]
        found["single_calls"] = await size(engine, [singles])
        await engine.dispose()
    return found


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=20_000, help="of the drain's measurement")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--runs", type=int, default=20, help="of the agent")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args()
    found = asyncio.run(measure(options.calls, options.batch, options.runs))
    table = Table("", "figure", "")
    for name, figures in found.items():
        for figure, value in figures.items():
            table.add_row(name, figure, f"{value:g}")
    Console().print(table)
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
