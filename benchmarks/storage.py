"""Measure how many bytes a stored call takes.

The size of its rows in PostgreSQL (table and TOAST; the indexes apart) is compared with its plain
JSON: the request and reply bodies as they were sent, without token ids. Measured are an agent with
tools that makes 40 calls, each repeating all earlier messages, and single calls with 4 KB prompts
and 2.9 KB replies, each an episode of its own.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from benchmarks import wire
from proxy.ingester.transcribe import question_digest, record_of
from proxy.spool.segments import encode_frame, read_frames
from store.database import make_engine
from store.embedded import EmbeddedPostgres
from store.ids import new_id
from store.records import CallRecord, Tokens, ToolCall
from store.schema.migrate import upgrade
from store.values.digests import PREFIX
from store.values.packing import pack_ids, pack_logprobs
from store.write.ingest import Ingester
from tests.support.records import call, captured

TURNS: Final = 40
WORDS: Final = Path(__file__).read_text().split()
BYTES_PER_TOKEN: Final = 4
VOCABULARY: Final = 150_000
_SIZES: Final = text("""
    SELECT sum(pg_table_size(relid)) AS rows, sum(pg_indexes_size(relid)) AS indexes
    FROM (SELECT relid FROM pg_partition_tree('transitions') WHERE isleaf
          UNION ALL SELECT unnest(ARRAY['episodes', 'provided_fingerprints']::regclass[])) tables
""")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=20, help="of the agent")
    options = parser.parse_args()
    figures = asyncio.run(measure(options.runs))
    table = Table("", "figure", "")
    for name, own in figures.items():
        for figure, value in own.items():
            table.add_row(name, figure, f"{value:g}")
    Console().print(table)


async def measure(runs: int) -> dict[str, dict[str, float]]:
    dice = random.Random(7)
    agents = [agent_calls(dice) for _ in range(runs)]
    singles = [record_of(single_call(dice)) for _ in range(runs * TURNS)]
    with tempfile.TemporaryDirectory() as folder:
        postgres = EmbeddedPostgres(Path(folder))
        url = postgres.ensure_running()
        try:
            await upgrade(url)
            engine = make_engine(url)
            sizes = {
                f"agent_{TURNS}_turns": await stored_bytes(engine, agents),
                "single_calls": await stored_bytes(
                    engine, [[record for record in singles if isinstance(record, CallRecord)]]
                ),
            }
            await engine.dispose()
        finally:
            postgres.stop()
    return sizes


async def stored_bytes(
    engine: AsyncEngine, episodes: Sequence[list[CallRecord]]
) -> dict[str, float]:
    """Store episodes in an empty ledger; return the mean bytes of a call, stored and as JSON."""
    async with engine.begin() as connection:
        await connection.execute(
            text("TRUNCATE transitions, episodes, provided_fingerprints CASCADE")
        )
    ingester = Ingester(question_digest=question_digest)
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


def single_call(dice: random.Random) -> bytes:
    """Return the spooled record of a call: 4 KB prompt of 200 ids, 2.9 KB reply of 20 ids."""
    messages = [{"role": "user", "content": prose(4000, dice)}]
    record = captured(
        str(new_id()),
        method="own",
        request=compact_json({"model": "m", "messages": messages}),
        reply=wire.reply(20).encode(),
        provides=(bytes((PREFIX,)) + dice.randbytes(15),),
        started_at=time.time(),
    )
    [(_, payload)] = read_frames(encode_frame(record))
    return payload


def agent_calls(dice: random.Random, turns: int = TURNS) -> list[CallRecord]:
    """Return an agent's run: a system prompt, tools, a tool call a turn, results up to 2 KB."""
    field = {"type": "string", "description": prose(60, dice)}
    schema = {"type": "object", "properties": {"path": field, "why": field}, "required": ["path"]}
    tools = [
        {
            "type": "function",
            "function": {
                "name": f"tool_{number}",
                "description": prose(150, dice),
                "parameters": schema,
            },
        }
        for number in range(6)
    ]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": prose(1500, dice)},
        {"role": "user", "content": prose(400, dice)},
    ]
    ids, episode, calls = some_ids(4500, dice), f"agent-{dice.random()}", []
    for _ in range(turns):
        arguments = {"path": f"src/{dice.randrange(1000)}.py", "why": prose(80, dice)}
        tool_call = ToolCall(
            id=f"call_{dice.randrange(16**24):024x}", name="read", arguments=json.dumps(arguments)
        )
        function = {"name": tool_call.name, "arguments": tool_call.arguments}
        message = {
            "role": "assistant",
            "content": prose(dice.randrange(50, 300), dice),
            "tool_calls": [{"id": tool_call.id, "type": "function", "function": function}],
        }
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "tool_calls"}
        reply = compact_json(
            {
                "id": f"chatcmpl-{new_id().hex}",
                "object": "chat.completion",
                "created": 1_795_000_000,
                "model": "m",
                "choices": [choice],
                "usage": {"prompt_tokens": 1000, "completion_tokens": 80, "total_tokens": 1080},
            }
        )
        sampled = some_ids(len(json.dumps(message)), dice)
        calls.append(
            call(
                episode,
                request=compact_json(
                    {"model": "m", "messages": messages, "tools": tools, "stream": False}
                ),
                reply=reply,
                response_id=f"chatcmpl-{new_id().hex}",
                tokens=Tokens(
                    prompt_ids=pack_ids(ids),
                    sampled_ids=pack_ids(sampled),
                    sampled_logprobs=pack_logprobs([-dice.random() for _ in sampled]),
                ),
                sampling=b'{"temperature":1.0,"top_p":1.0,"top_k":0}',
                tool_calls=(tool_call,),
                usage=b'{"prompt_tokens":200,"completion_tokens":20,"total_tokens":220}',
                provides=(bytes([PREFIX]) + sha256(reply).digest()[:15],),
            )
        )
        result = prose(dice.randrange(200, 2000), dice)
        messages += [message, {"role": "tool", "tool_call_id": tool_call.id, "content": result}]
        ids = ids + sampled + some_ids(len(result) + 8 * BYTES_PER_TOKEN, dice)
    return calls


def prose(length: int, dice: random.Random) -> str:
    """Return a text of `length` characters, about as compressible as a prompt."""
    words: list[str] = []
    size = 0
    # The last word's blank is not in the text.
    while size <= length:
        words.append(dice.choice(WORDS) + str(dice.randrange(100)))
        size += len(words[-1]) + 1
    return " ".join(words)[:length]


def some_ids(length: int, dice: random.Random) -> list[int]:
    """Return random token ids for a text of `length` bytes."""
    return [dice.randrange(VOCABULARY) for _ in range(length // BYTES_PER_TOKEN)]


def compact_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


if __name__ == "__main__":
    main()
