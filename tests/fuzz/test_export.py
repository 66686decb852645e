"""Any calls and statements, stored and exported: each line is one JSON document of one episode."""

import json
from io import BytesIO
from typing import Any

from hypothesis import given
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.export import export
from proxy.ingester.transcribe import transcribe
from store.errors import Damaged, RecordRefused
from store.ids import new_id
from store.records import SpoolRecord
from store.selecting import Selection
from store.write.ingest import Ingester
from tests.fuzz import calls
from tests.fuzz.profile import fuzzing
from tests.fuzz.tape import Tape, made_of
from tests.fuzz.texts import BLANKS
from tests.support.ledger.shared_database import SharedDatabase
from tests.support.records import captured, reward

FORGED = b'\n{"episode":"forged","state":"scored","feedback":[{"metric":"reward","value":1}]}\n'


def _call(tape: Tape) -> dict[str, Any]:
    call = calls.recorded(tape)
    if tape.rarely():
        # Blanks between two fields are JSON; a line that looks like one of ours is none.
        blank = tape.pick((*BLANKS, FORGED))
        call["request"] = call["request"].replace(b",", b"," + blank, 1)
    return call


@fuzzing(40, slow=True)
@given(made_of(lambda tape: [_call(tape) for _ in range(1 + tape.below(4))]))
def test_any_recorded_call_is_exported_as_a_json_line(
    shared: SharedDatabase, drawn: list[dict[str, Any]]
) -> None:
    agent = str(new_id())
    keys = [str(new_id()) for _ in drawn]
    records = [
        transcribe(captured(key, agent=agent, **call))
        for key, call in zip(keys, drawn, strict=True)
    ]
    exported, stored, damaged = shared.run(_exported(shared.engine, agent, records))
    lines = exported.split(b"\n")
    assert lines.pop() == b""
    found = [json.loads(line) for line in lines]
    # What the database refuses is a dead letter of its own; what cannot be read back is named.
    assert {line["episode"] for line in found} | damaged == stored
    assert len(found) + len(damaged) == len(stored)
    for line in found:
        assert line["state"] == "scored"
        assert len(line["calls"]) == 1


async def _exported(
    engine: AsyncEngine, agent: str, records: list[Any]
) -> tuple[bytes, set[str], set[str]]:
    """Store them, each by itself; returns the export, the episodes stored, and those damaged."""
    ingester, out = Ingester(), BytesIO()
    stored: set[str] = set()
    for record in records:
        batch: list[SpoolRecord] = [record, reward(0.5, episode=record.episode)]
        try:
            await ingester.store(engine, batch)
        except RecordRefused:
            continue
        stored.add(record.episode)
    async with engine.connect() as connection:
        rows = await connection.execute(
            text("SELECT id, key FROM episodes WHERE key = ANY(:keys)"), {"keys": list(stored)}
        )
        key_of = {row.id: row.key for row in rows}
    damaged: set[str] = set()
    try:
        await export(engine, Selection(agent=agent), out)
    except Damaged as error:
        damaged = {key_of[id_] for id_ in error.episodes}
    return out.getvalue(), stored, damaged
