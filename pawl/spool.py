"""Show the records that wait on disk and the dead letters, and replay letters (`pawl spool`)."""

from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.calls.capture import MOST_INFLATED, CapturedCall, Gap
from proxy.keeper.entries import record_of
from proxy.keeper.letters import FOLDER, LETTER, REASON
from proxy.keeper.transcribe import NO_READERS
from proxy.spool.folders import OPEN, SEALED
from proxy.spool.segments import decode_payload, read_pieces
from proxy.tools.result_readers import ResultReaders
from store.connection.availability import is_no_records_fault
from store.records import Record
from store.write.ingest import Ingester


class DeadLetter(Record, frozen=True, kw_only=True):
    """Describe a record that the store refused, or a frame of the spool that cannot be read.

    Attributes:
        path: the letter's file.
        reason: why it was not stored.
        bytes: the size of the file.
        about: which call, gap or feedback it holds, as far as it can be read.
    """

    path: str
    reason: str
    bytes: int
    about: str


class SpoolView(Record, frozen=True, kw_only=True):
    """Describe the contents of a spool directory.

    Attributes:
        segments: number of segment files.
        records: readable records in them; some may be in the database already.
        damaged: records that can no longer be read; the keeper makes dead letters of them.
        bytes: size of all segments.
        dead_letters: the dead letters, oldest first.
    """

    segments: int
    records: int
    damaged: int
    bytes: int
    dead_letters: tuple[DeadLetter, ...]


def look(folder: Path) -> SpoolView:
    """Return what waits in the spool directory `folder`, and its dead letters."""
    segments = records = damaged = size = 0
    for path in sorted([*folder.glob(f"*/*{SEALED}"), *folder.glob(f"*/*{OPEN}")]):
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            # A running proxy has stored its records and deleted it since it was listed.
            continue
        segments, size = segments + 1, size + len(content)
        for piece in read_pieces(content, ended=path.suffix == SEALED):
            records += not piece.damage
            damaged += piece.records if piece.damage else 0
    letters = sorted((folder / FOLDER).glob(f"*{LETTER}"))
    return SpoolView(
        segments=segments,
        records=records,
        damaged=damaged,
        bytes=size,
        dead_letters=tuple(_letter(path) for path in letters),
    )


def _letter(path: Path) -> DeadLetter:
    payload, reason = path.read_bytes(), path.with_suffix(REASON)
    return DeadLetter(
        path=str(path),
        reason=reason.read_text(errors="replace") if reason.exists() else "unknown",
        bytes=len(payload),
        about=_about(payload),
    )


def _about(payload: bytes) -> str:
    try:
        record = decode_payload(payload)
    except Exception:
        # A letter may hold any bytes; list it like the others.
        return "not a record"
    if isinstance(record, CapturedCall):
        return f"call {UUID(bytes=record.id)} of episode {record.episode}"
    if isinstance(record, Gap):
        return f"gap: the mark of {len(record.episodes)} episodes that miss a call"
    return f"feedback {record.id} ({len(record.items)} statements)"


async def replay(
    folder: Path,
    engine: AsyncEngine,
    readers: ResultReaders = NO_READERS,
    most_reply: int = MOST_INFLATED,
) -> tuple[int, list[str]]:
    """Try to store each dead letter again; delete those that are stored, and keep the others.

    Args:
        folder: the spool directory.
        engine: the database.
        readers: how results of tools are read (`PAWL_TOOL_RESULTS`).
        most_reply: the largest reply that is read, in bytes.

    Returns:
        The number of letters stored, and a line with the reason for each one that was not.

    Raises:
        Exception: the database does not answer (any error for which
            `store.connection.availability.is_no_records_fault` is true); the letters that were not
            tried stay.
    """
    ingester = Ingester()
    stored, refused = 0, []
    for letter in look(folder).dead_letters:
        path = Path(letter.path)
        payload = path.read_bytes()
        try:
            await ingester.store(engine, [record_of(payload, readers, most_reply)])
        except Exception as error:
            if is_no_records_fault(error):
                raise
            # Whatever is wrong with one letter, the next one may still be stored.
            refused.append(f"{path.name}: {_first(str(error)) or type(error).__name__}")
            continue
        path.unlink()
        path.with_suffix(REASON).unlink(missing_ok=True)
        stored += 1
    return stored, refused


def as_lines(view: SpoolView) -> list[str]:
    """Return the view as lines of text."""
    lines = [f"{view.records} records in {view.segments} segments ({view.bytes} bytes)"]
    if view.damaged:
        lines.append(f"{view.damaged} damaged records, which cannot be read")
    lines.append(f"{len(view.dead_letters)} dead letters")
    lines += [f"  {Path(d.path).name}: {d.about}: {_first(d.reason)}" for d in view.dead_letters]
    return lines


def _first(reason: str) -> str:
    return reason.splitlines()[0][:200] if reason else ""


def as_json(view: SpoolView) -> Any:
    """Return the view as objects that `json.dumps` takes."""
    return msgspec.to_builtins(view)
