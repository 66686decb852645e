"""`pawl spool`: what waits on disk to be stored, and what could not be; and another try at it."""

from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.capture import MOST_INFLATED, Captured, Gap
from proxy.keeping.entries import record_of
from proxy.keeping.letters import FOLDER, LETTER, REASON
from proxy.keeping.transcribe import NO_READERS
from proxy.result_readers import ResultReaders
from proxy.segments import decode_payload, read_pieces
from proxy.spooling.folders import OPEN, SEALED
from store.away import is_away
from store.ingest import Ingester
from store.records import Record


class DeadLetter(Record, frozen=True, kw_only=True):
    """A record that cannot be stored, or a damaged frame; `about` is what can be told of it."""

    path: str
    reason: str
    bytes: int
    about: str


class SpoolView(Record, frozen=True, kw_only=True):
    """What a spool directory holds. Segments may hold records that are stored already.

    `damaged` are records that cannot be read any more, and will become dead letters.
    """

    segments: int
    records: int
    damaged: int
    bytes: int
    dead_letters: tuple[DeadLetter, ...]


def look(folder: Path) -> SpoolView:
    """What waits in `folder`, and its dead letters, oldest first."""
    segments = records = damaged = size = 0
    for path in sorted([*folder.glob(f"*/*{SEALED}"), *folder.glob(f"*/*{OPEN}")]):
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            # A proxy that runs has stored and deleted it meanwhile.
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
        # Whatever it holds, it is told of like the others.
        return "not a record"
    if isinstance(record, Captured):
        return f"call {UUID(bytes=record.id)} of episode {record.episode}"
    if isinstance(record, Gap):
        return f"the mark of {len(record.episodes)} episodes that miss a call"
    return f"feedback {record.id} ({len(record.items)} statements)"


async def replay(
    folder: Path,
    engine: AsyncEngine,
    readers: ResultReaders = NO_READERS,
    most_reply: int = MOST_INFLATED,
) -> tuple[int, list[str]]:
    """Try to store each dead letter again; returns how many were, and why the others were not.

    A letter that is stored is removed; one that is not stays as it is.

    Raises:
        Exception: the database is away (see `store.away`); what is left stays.
    """
    ingester = Ingester()
    stored, refused = 0, []
    for letter in look(folder).dead_letters:
        path = Path(letter.path)
        payload = path.read_bytes()
        try:
            await ingester.store(engine, [record_of(payload, readers, most_reply)])
        except Exception as error:
            if is_away(error):
                raise
            # What one letter raises says nothing of the next.
            refused.append(f"{path.name}: {_first(str(error)) or type(error).__name__}")
            continue
        path.unlink()
        path.with_suffix(REASON).unlink(missing_ok=True)
        stored += 1
    return stored, refused


def as_lines(view: SpoolView) -> list[str]:
    """For people."""
    lines = [f"{view.records} records in {view.segments} segments ({view.bytes} bytes)"]
    if view.damaged:
        lines.append(f"{view.damaged} damaged records, which cannot be read")
    lines.append(f"{len(view.dead_letters)} dead letters")
    lines += [f"  {Path(d.path).name}: {d.about}: {_first(d.reason)}" for d in view.dead_letters]
    return lines


def _first(reason: str) -> str:
    return reason.splitlines()[0][:200] if reason else ""


def as_json(view: SpoolView) -> Any:
    """For scripts."""
    return msgspec.to_builtins(view)
