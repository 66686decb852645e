"""`pawl spool`: what waits on disk to be stored, and what could not be; and another try at it."""

import zlib
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.capture import Captured, Gap
from proxy.keeping.drain import record_of
from proxy.keeping.transcribe import NO_READERS
from proxy.result_readers import ResultReaders
from proxy.segments import decode_payload, read_frames
from proxy.spooling.folders import OPEN, SEALED
from store.errors import Refused
from store.ingest import Ingester
from store.records import Record


class DeadLetter(Record, frozen=True, kw_only=True):
    """A record that the database refused, or a torn frame; `about` is what can be told of it."""

    path: str
    reason: str
    bytes: int
    about: str


class SpoolView(Record, frozen=True, kw_only=True):
    """What a spool directory holds. Segments may hold records that are stored already."""

    segments: int
    records: int
    bytes: int
    dead_letters: tuple[DeadLetter, ...]


def look(folder: Path) -> SpoolView:
    """What waits in `folder`, and its dead letters, oldest first."""
    segments = sorted([*folder.glob(f"*/*{SEALED}"), *folder.glob(f"*/*{OPEN}")])
    contents = [segment.read_bytes() for segment in segments]
    return SpoolView(
        segments=len(segments),
        records=sum(sum(1 for _ in read_frames(content)) for content in contents),
        bytes=sum(len(content) for content in contents),
        dead_letters=tuple(_letter(path) for path in sorted((folder / "dead").glob("*.letter"))),
    )


def _letter(path: Path) -> DeadLetter:
    payload, reason = path.read_bytes(), path.with_suffix(".reason")
    return DeadLetter(
        path=str(path),
        reason=reason.read_text() if reason.exists() else "unknown",
        bytes=len(payload),
        about=_about(payload),
    )


def _about(payload: bytes) -> str:
    try:
        record = decode_payload(payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return "not a record"
    if isinstance(record, Captured):
        return f"call {UUID(bytes=record.id)} of episode {record.episode}"
    if isinstance(record, Gap):
        return f"the mark of {len(record.episodes)} episodes that miss a call"
    return f"feedback {record.id} ({len(record.items)} statements)"


async def replay(
    folder: Path, engine: AsyncEngine, readers: ResultReaders = NO_READERS
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
        try:
            await ingester.store(engine, [record_of(path.read_bytes(), readers)])
        except (Refused, msgspec.DecodeError, UnicodeDecodeError, zlib.error) as error:
            refused.append(f"{path.name}: {str(error).splitlines()[0]}")
            continue
        path.unlink()
        path.with_suffix(".reason").unlink(missing_ok=True)
        stored += 1
    return stored, refused


def as_lines(view: SpoolView) -> list[str]:
    """For people."""
    lines = [f"{view.records} records in {view.segments} segments ({view.bytes} bytes)"]
    lines.append(f"{len(view.dead_letters)} dead letters")
    lines += [f"  {Path(d.path).name}: {d.about}: {_first(d.reason)}" for d in view.dead_letters]
    return lines


def _first(reason: str) -> str:
    return reason.splitlines()[0][:200] if reason else ""


def as_json(view: SpoolView) -> Any:
    """For scripts."""
    return msgspec.to_builtins(view)
