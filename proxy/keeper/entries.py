"""Turn a piece of a segment into the ledger's record, or a reason why there is none (pure)."""

import gc
from pathlib import Path
from typing import Final, NamedTuple
from uuid import UUID

from proxy.calls.capture import MOST_INFLATED, CapturedCall, Gap
from proxy.keeper.transcribe import NO_READERS, transcribe
from proxy.spool.segments import Piece, decode_payload
from proxy.tools.result_readers import ResultReaders
from store.records import GapRecord, SpoolRecord

CANNOT_BE_READ: Final = "cannot be read"


class Entry(NamedTuple):
    """Hold a piece of a segment with its record, or with the reason why it has none."""

    piece: Piece
    record: SpoolRecord | None
    reason: str


def read_entry(
    piece: Piece, readers: ResultReaders = NO_READERS, most_reply: int = MOST_INFLATED
) -> Entry:
    """Return the record of a piece, or why it cannot be read.

    This never raises: a record that cannot be read must not stop the others.
    """
    if piece.damage:
        return Entry(piece, None, piece.damage)
    try:
        try:
            return Entry(piece, record_of(piece.data, readers, most_reply), "")
        except MemoryError:
            # Other work may have held the memory: collect garbage and try once more.
            gc.collect()
            return Entry(piece, record_of(piece.data, readers, most_reply), "")
    except Exception as error:
        # Clients and models decide what is in it; reading it again would fail the same way.
        cause = f"{type(error).__name__} at {raised_at(error)}"
        return Entry(piece, None, f"{CANNOT_BE_READ}: {cause}: {error}")


def raised_at(error: Exception) -> str:
    """Return file and line of the code that raised `error`, as `file.py:12`."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return "an unknown place"
    return f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"


def record_of(
    payload: bytes, readers: ResultReaders = NO_READERS, most_reply: int = MOST_INFLATED
) -> SpoolRecord:
    """Return the ledger's record in a spooled payload.

    Raises:
        Exception: this version of Pawl cannot read it. The type is not narrower, because the
            content is a client's and a model's.
    """
    frame = decode_payload(payload)
    if isinstance(frame, CapturedCall):
        return transcribe(frame, readers, most_reply)
    if isinstance(frame, Gap):
        return GapRecord(id=UUID(bytes=frame.id), episodes=frame.episodes)
    return frame
