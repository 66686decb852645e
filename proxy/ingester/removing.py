"""Dead letters, and the removal of deleted and outdated records.

A dead letter is a record that cannot be stored, kept with the reason until somebody looks at it. It
holds prompts, and is the only copy of its record: only the proxy's user may read it, and it is
durable before its segment is deleted.

The drain leaves out records of deleted episodes. Dead letters are not drained, so every ingester
searches its own letters for deleted episodes.
"""

import asyncio
from collections.abc import Iterable, Sequence, Set
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Final, NamedTuple
from uuid import UUID

import msgspec
import structlog
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from proxy.ingester.segment_reader import segment_files
from proxy.metrics import OUTDATED
from proxy.spool.folders import PRIVATE_MODE
from proxy.spool.segments import (
    CapturedCall,
    Frame,
    decode_payload,
    encode_payload,
    read_frames,
)
from store import retaining, tombstones
from store.database import database_time
from store.files import sync, write_private
from store.ids import time_of
from store.records import FeedbackRecord
from store.retaining import LOWEST_ID, Removed, remove_some
from store.tombstones import Named, known_tombstones, last_deletion, tombstones_of, undeleted_keys

log = structlog.get_logger()

LETTERS_FOLDER: Final = "dead"
LETTER_SUFFIX: Final = ".letter"
REASON_SUFFIX: Final = ".reason"


class DeadLetter(NamedTuple):
    """A record's bytes, and why it cannot be stored; `name` is unique to the record."""

    name: str
    data: bytes
    reason: str


def write_dead_letters(root: Path, letters: Sequence[DeadLetter]) -> None:
    """Write letters durably to the spool at `root`; writing the same names again is harmless.

    Raises:
        OSError: they could not all be written.
    """
    folder = root / LETTERS_FOLDER
    if not folder.exists():
        folder.mkdir(mode=PRIVATE_MODE)
        sync(root)
    for letter in letters:
        write_private(
            folder / f"{letter.name}{REASON_SUFFIX}", letter.reason.encode(errors="replace")
        )
        write_private(folder / f"{letter.name}{LETTER_SUFFIX}", letter.data)
    sync(folder)


CHANGED_REASON: Final = b"refused; its parts about deleted episodes were removed later"


def names_in(frame: Frame) -> Iterable[Named]:
    """Return the names in a record whose deletion would delete the record or a part of it."""
    if isinstance(frame, CapturedCall):
        return [("episode", frame.episode)]
    return tombstones.names_in(frame)


def without_deleted(frame: Frame, deleted: Set[UUID]) -> Frame | None:
    """Return a record without its parts about deleted names, or None if nothing is left."""
    if isinstance(frame, CapturedCall):
        return frame if undeleted_keys([frame.episode], deleted) else None
    return tombstones.without_deleted(frame, deleted)


class DeadLetterCleaner:
    """Remove this machine's dead letters about deleted episodes."""

    def __init__(self, root: Path) -> None:
        """Begin with all letters unsearched; `root` is the spool's folder."""
        self._root = root
        self._seen: set[Path] = set()
        # The number of the last deletion; None before the first look.
        self._deletion: int | None = None

    async def remove(self, engine: AsyncEngine | None) -> None:
        """Search new letters for deleted episodes; after a deletion, search all letters again."""
        if engine is None:
            return
        async with engine.connect() as connection:
            newest = await last_deletion(connection)
            seen = self._seen if newest == self._deletion else set()
            present = set(await asyncio.to_thread(dead_letters_in, self._root))
            if newest:
                await remove_letters(connection, sorted(present - seen))
            if self._deletion is not None and newest > self._deletion:
                # Only a number is logged: the names are not kept anywhere.
                log.info("episodes_deleted", episodes=newest - self._deletion)
            self._seen, self._deletion = present, newest


def dead_letters_in(root: Path) -> list[Path]:
    """Return the dead letters of the spool at `root`."""
    return sorted((root / LETTERS_FOLDER).glob(f"*{LETTER_SUFFIX}"))


async def remove_letters(
    connection: AsyncConnection, letters: Iterable[Path], names: Sequence[str] = ()
) -> int:
    """Remove deleted episodes from dead letters; return how many letters were changed or removed.

    A letter that is also about other episodes is written again without the deleted ones. A letter
    that cannot be decoded is removed if one of `names` (of deleted episodes) is a field in it.

    Raises:
        OSError: the disk fails; the remaining letters can be searched later.
    """
    removed = 0
    # Encoded as a record's field, with its length in front, so that words in prompts do not match.
    encoded = [msgspec.msgpack.encode(name) for name in names]
    for path in letters:
        try:
            payload = await asyncio.to_thread(path.read_bytes)
        except FileNotFoundError:
            # The letter was replayed meanwhile (`pawl spool --replay`).
            continue
        remaining = None
        try:
            frame = decode_payload(payload)
        except Exception:
            # A letter may hold any bytes.
            if not any(name in payload for name in encoded):
                continue
        else:
            remaining = without_deleted(
                frame, await known_tombstones(connection, tombstones_of(names_in(frame)))
            )
            if remaining == frame:
                continue
        await asyncio.to_thread(replace_letter, path, remaining)
        removed += 1
    if removed:
        log.info("dead_letters_of_deleted_episodes", letters=removed)
    return removed


def replace_letter(path: Path, remaining: Frame | None) -> None:
    """Replace a letter's record by `remaining`, or remove the letter if that is None.

    Raises:
        OSError: the disk fails.
    """
    reason = path.with_suffix(REASON_SUFFIX)
    if remaining is None:
        path.unlink(missing_ok=True)
        reason.unlink(missing_ok=True)
    else:
        # The reason may quote the whole record.
        write_private(reason, CHANGED_REASON)
        write_private(path, encode_payload(remaining))
    sync(path.parent)


async def count_waiting_deleted(connection: AsyncConnection, root: Path) -> int:
    """Return how many records about deleted episodes are in this machine's segments."""
    records = 0
    for _, path in segment_files(root):
        frames = await asyncio.to_thread(_frames_in, path)
        deleted = await known_tombstones(
            connection, {one for frame in frames for one in tombstones_of(names_in(frame))}
        )
        records += sum(without_deleted(frame, deleted) != frame for frame in frames)
    return records


def _frames_in(path: Path) -> list[Frame]:
    """Return the readable records of a segment; the others will become dead letters."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        # The segment was stored meanwhile, or was renamed, and is counted at the next look.
        return []
    frames = []
    for _, payload in read_frames(content):
        with suppress(msgspec.MsgspecError):
            frames.append(decode_payload(payload))
    return frames


# Pause between two steps, so that records are stored meanwhile.
REMOVAL_PAUSE_S: Final = 0.05


async def remove_outdated(root: Path, days: int, engine: AsyncEngine | None) -> None:
    """Remove records older than `days` days from the database and the dead letters at `root`."""
    if engine is None:
        return
    # A clock that is set ahead must not remove new records: two clocks have to agree.
    today = min(datetime.now(UTC), await database_time(engine)).date()
    before = today - timedelta(days=days)
    await remove_outdated_records(engine, before)
    letters = await asyncio.to_thread(remove_old_letters, root, before)
    if letters:
        OUTDATED.labels("letters").inc(letters)
        log.info("outdated_letters_removed", letters=letters)


async def remove_pending(days: int, engine: AsyncEngine | None) -> None:
    """Remove statements that have waited `days` days for their target; count them in a metric."""
    while engine is not None and (removed := await retaining.remove_pending(engine, days)):
        OUTDATED.labels("pending").inc(removed)
        await asyncio.sleep(REMOVAL_PAUSE_S)


async def remove_outdated_records(engine: AsyncEngine, before: date) -> None:
    """Remove the database's records from before a day; count them in a metric."""
    after = LOWEST_ID
    while (removed := await remove_some(engine, before, after)) is not None:
        after = removed.last
        _count(removed)
        await asyncio.sleep(REMOVAL_PAUSE_S)


def _count(removed: Removed) -> None:
    for what in ("episodes", "unspent", "calls", "statements"):
        OUTDATED.labels(what).inc(getattr(removed, what))
    if removed.day is not None:
        log.info("day_dropped", day=removed.day, calls=removed.calls)
    elif removed.episodes or removed.calls:
        log.info(
            "outdated_removed",
            episodes=removed.episodes,
            unspent=removed.unspent,
            calls=removed.calls,
        )


def remove_old_letters(root: Path, before: date) -> int:
    """Remove this machine's dead letters of records made before a day; return how many.

    A letter that cannot be read or removed is logged, and tried again at the next look.
    """
    removed = 0
    for path in dead_letters_in(root):
        try:
            if _made_at(path).date() < before:
                replace_letter(path, None)
                removed += 1
        except FileNotFoundError:
            # The letter was replayed meanwhile.
            continue
        except OSError as error:
            log.error("letter_not_removed", letter=path.name, reason=str(error))
    return removed


def _made_at(letter: Path) -> datetime:
    """Return when a letter's record was made or, if it is unreadable, the letter was written."""
    payload = letter.read_bytes()
    try:
        frame = decode_payload(payload)
    except Exception:
        # A letter may hold any bytes.
        return datetime.fromtimestamp(letter.stat().st_mtime, UTC)
    if isinstance(frame, CapturedCall):
        return time_of(UUID(bytes=frame.id))
    return frame.at if isinstance(frame, FeedbackRecord) else time_of(frame.id)
