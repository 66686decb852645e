"""From a piece of a segment to the ledger's record, or to the reason why there is none (pure)."""

import gc
from pathlib import Path
from typing import Final, NamedTuple
from uuid import UUID

from proxy.capture import MOST_INFLATED, Captured, Gap
from proxy.keeping.transcribe import NO_READERS, transcribe
from proxy.result_readers import ResultReaders
from proxy.segments import Piece, decode_payload
from store.records import GapRecord, SpoolRecord

CANNOT_BE_READ: Final = "cannot be read"


class Entry(NamedTuple):
    """A piece of a segment and its record; where it has none, the reason why."""

    piece: Piece
    record: SpoolRecord | None
    reason: str


def read_entry(
    piece: Piece, readers: ResultReaders = NO_READERS, most_reply: int = MOST_INFLATED
) -> Entry:
    """Return what a piece says. It never raises: a record that cannot be read stops no other."""
    if piece.damage:
        return Entry(piece, None, piece.damage)
    try:
        try:
            return Entry(piece, record_of(piece.data, readers, most_reply), "")
        except MemoryError:
            # Others may have had the memory: once more, with all that can be given back.
            gc.collect()
            return Entry(piece, record_of(piece.data, readers, most_reply), "")
    except Exception as error:
        # A client and a model decide what is in it, and reading it again ends the same way.
        what = f"{type(error).__name__} at {raised_at(error)}"
        return Entry(piece, None, f"{CANNOT_BE_READ}: {what}: {error}")


def raised_at(error: Exception) -> str:
    """Return the place in the code that raised `error`, for those who look for its cause."""
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
        Exception: there is none that this Pawl can read; whatever a client or model put into it
            may have raised it.
    """
    frame = decode_payload(payload)
    if isinstance(frame, Captured):
        return transcribe(frame, readers, most_reply)
    if isinstance(frame, Gap):
        return GapRecord(id=UUID(bytes=frame.id), episodes=frame.episodes)
    return frame
