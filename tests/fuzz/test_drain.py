"""Any segment through the drain: each whole record ends somewhere, and the drain goes on."""

from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.ingester.drain import Drainer
from proxy.spool.segments import (
    PROCESS_MARK,
    CapturedCall,
    decode_payload,
    encode_frame,
    frame_payload,
    read_frames,
)
from store.ids import new_id
from tests.fuzz import calls
from tests.fuzz.profile import fuzzing
from tests.fuzz.tape import Tape, made_of
from tests.support.ledger.shared_database import SharedDatabase
from tests.support.records import captured

OUTCOMES: Final = ("stored", "dead_lettered", "dropped", "deleted")
NAMES: Final = ("e1", "m", "", "\0", "x" * 2_000, "\U0001f600" * 1_024, "a\nb")
# Far more turns than any segment has records.
TURNS: Final = 200


class Piece(NamedTuple):
    """A part of a segment: a whole record, or bytes that are none."""

    data: bytes
    record: CapturedCall | None


def _call(tape: Tape) -> CapturedCall:
    """A call as a worker may have written it, or may not."""
    odd = {
        "episode": tape.pick(NAMES),
        "agent": tape.pick(NAMES),
        "task": tape.pick((None, *NAMES)),
        "policy": tape.pick(("m", None, *NAMES)),
        "policy_version": tape.pick((0, None, -1, 2**40)),
        "dialect": tape.pick((*calls.FORMATS, "none")),
        "status": tape.pick(("complete", "truncated", "client_gone", "upstream_error")),
        "http_status": tape.pick((200, 400, None, 2**40)),
        "deflated": True,
        "provides": tape.pick(((), (b"x" * 16,), (b"",), (b"\xff" * 3,))),
        "retry": tape.pick((0, 1, -1, 2**40)),
        "default_temperature": tape.pick((1.0, float("nan"), float("inf"))),
        "sampling_defaults": tape.pick(({}, {"top_p": 0.9}, {"top_k": float("nan")})),
        "tool_grammars": False,
        "tool_tag": tape.pick(("hermes", "no such syntax", "")),
        "explored": tape.pick((None, {"temperature": 1.3}, {"temperature": float("nan")})),
        "started_at": tape.pick((0.0, -1e20, 1e20, float("nan"))),
        "total_ms": tape.pick((1.0, float("nan"), -1.0)),
        "id": tape.pick((b"", b"x", b"x" * 16, b"x" * 17)),
    }
    strange = {name: value for name, value in odd.items() if tape.rarely() and tape.rarely()}
    own = {"episode": str(new_id()), "served_model": tape.pick(("m@1", "m", None))}
    return captured(**(calls.recorded(tape) | own | strange))


def _piece(tape: Tape) -> Piece:
    if tape.below(4):
        record = _call(tape)
        return Piece(encode_frame(record), record)
    frame = encode_frame(captured(str(new_id())))
    match tape.below(4):
        case 0:
            at = tape.below(len(frame))
            return Piece(
                frame[:at] + bytes([frame[at] ^ 1 << tape.below(8)]) + frame[at + 1 :], None
            )
        case 1:
            return Piece(frame[: tape.below(len(frame))], None)
        case 2:
            return Piece(tape.bytes(30), None)
        case _:
            # A whole frame of something else.
            payload = tape.pick((b"\x93\x01\x02", b"", b"\xc1", b"\x81\xa1", b"\x91" * 2_000))
            return Piece(frame_payload(payload), None)


ID_BYTES = 16
segments = made_of(lambda tape: [_piece(tape) for _ in range(1 + tape.below(5))])


@fuzzing(500)
@given(st.binary(max_size=40) | segments.map(lambda pieces: b"".join(p.data for p in pieces)))
def test_any_segment_is_read_to_an_end(data: bytes) -> None:
    before = 0
    for end, payload in read_frames(data):
        assert before < end <= len(data)
        before = end
        # Whatever is raised is a reason that can be written beside the record.
        with suppress(Exception):
            decode_payload(payload)


@fuzzing(40, slow=True)
@given(segments)
def test_every_whole_record_is_stored_or_a_dead_letter_with_its_reason(
    shared: SharedDatabase, pieces: list[Piece]
) -> None:
    with TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "0").mkdir()
        name = f"{new_id()}_{PROCESS_MARK.hex()}.seg"
        (root / "0" / name).write_bytes(b"".join(piece.data for piece in pieces))
        ids = [piece.record.id for piece in pieces if piece.record is not None]
        before = _counted()
        taken, stored = shared.run(_drained(root, shared.engine, ids))
        assert not list(root.glob("0/*")), "the drain did not come to the segment's end"
        letters = {path.read_bytes() for path in root.glob("dead/*.letter")}
        reasons = [path.read_text() for path in root.glob("dead/*.reason")]
    assert len(letters) <= len(reasons)
    assert all(reasons)
    for piece in pieces:
        # An id that no worker makes may have come in an earlier example, with another record.
        if piece.record is not None and piece.record.id not in taken:
            [(_, payload)] = read_frames(piece.data)
            assert (payload in letters) != (piece.record.id in stored)
    made, *ends = (now - then for now, then in zip(_counted(), before, strict=True))
    assert made == sum(ends)
    assert made >= len(ids)


async def _drained(
    root: Path, engine: AsyncEngine, ids: list[bytes]
) -> tuple[set[bytes], set[bytes]]:
    """Which of some ids were stored before the drain, and which are after it."""
    drainer = Drainer(root, lambda: engine, batch=3)
    taken = await _stored(engine, ids)
    for _ in range(TURNS):
        if not await drainer.drain_once() and not list(root.glob("0/*.seg")):
            break
    return taken, await _stored(engine, ids)


async def _stored(engine: AsyncEngine, ids: list[bytes]) -> set[bytes]:
    wanted = {"ids": [UUID(bytes=id_) for id_ in ids if len(id_) == ID_BYTES]}
    async with engine.connect() as connection:
        rows = await connection.execute(
            text("SELECT id FROM transitions WHERE id = ANY(:ids)"), wanted
        )
        return {UUID(str(row[0])).bytes for row in rows}


def _counted() -> tuple[float, ...]:
    """Records that were made, and where they ended."""
    names = ("", *(f"_{how}" for how in OUTCOMES))
    found = (REGISTRY.get_sample_value(f"pawl_records{name}_total") for name in names)
    return tuple(value or 0.0 for value in found)
