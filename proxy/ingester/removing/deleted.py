"""Tell which records on this machine's disk are about deleted episodes, and remove their letters.

The drain leaves such records out by itself, and deletes their segment once it is stored. Dead
letters are not drained: every ingester looks through its own, whoever deleted the episode.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Final
from uuid import UUID

import msgspec
import structlog
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from proxy.calls.capture import CapturedCall, Frame, Gap
from proxy.ingester.backlog import segment_files
from proxy.ingester.letters import FOLDER, LETTER, REASON
from proxy.spool.segments import decode_payload, encode_payload, read_frames
from store.connection.availability import is_unavailable
from store.deleting.names import (
    Named,
    digests,
    feedback_without,
    keys_left,
    names_in_feedback,
)
from store.deleting.tombstones import known, last_deletion
from store.files import sync, write_private
from store.records import CallRecord, FeedbackRecord

log = structlog.get_logger()

LOOK_S: Final = 10.0
CHANGED: Final = b"refused; what was about deleted episodes was removed from it"


def names_in(frame: Frame) -> list[Named]:
    """Return the names by which it is known whether a record, or a part of it, is deleted."""
    if isinstance(frame, FeedbackRecord):
        return names_in_feedback(frame)
    return [("episode", key) for key in _keys_in(frame)]


def without_deleted(frame: Frame, deleted: Set[UUID]) -> Frame | None:
    """Return what is left of a record without the deleted names; None: nothing is."""
    if isinstance(frame, FeedbackRecord):
        return feedback_without(frame, deleted)
    keys = keys_left(_keys_in(frame), deleted)
    if keys and isinstance(frame, Gap):
        return msgspec.structs.replace(frame, episodes=keys)
    return frame if keys else None


def _keys_in(frame: CapturedCall | CallRecord | Gap) -> tuple[str, ...]:
    return frame.episodes if isinstance(frame, Gap) else (frame.episode,)


async def keep_deleted(root: Path, connect: Callable[[], AsyncEngine | None]) -> None:
    """Remove dead letters about deleted episodes, every `LOOK_S` seconds, until cancelled.

    Only letters that are new since the last deletion are read again.
    """
    seen: set[Path] = set()
    deletion = 0
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            engine = connect()
            if engine is None:
                continue
            async with engine.connect() as connection:
                newest = await last_deletion(connection)
                seen = seen if newest == deletion else set()
                there = set(await asyncio.to_thread(letters_of, root))
                if newest:
                    await remove_letters(connection, sorted(there - seen))
                seen, deletion = there, newest
        except Exception as error:
            # This task must not end: the letters are looked through again in any case.
            note = log.warning if is_unavailable(error) else log.exception
            note("dead_letters_not_looked_through", reason=type(error).__name__)


def letters_of(root: Path) -> list[Path]:
    """Return the dead letters of the spool at `root`."""
    return sorted((root / FOLDER).glob(f"*{LETTER}"))


async def remove_letters(
    connection: AsyncConnection, letters: Iterable[Path], names: Sequence[str] = ()
) -> int:
    """Remove from dead letters what is about deleted episodes; return how many changed.

    A letter that is about others, too, is written again without it. One that is no record is
    removed if it holds one of `names` as a field; they are those of deleted episodes.

    Raises:
        OSError: the disk fails; what was not removed can be removed later.
    """
    removed = 0
    # As a field of a record, its length before it: a word of that name in a prompt is another's.
    encoded = [msgspec.msgpack.encode(name) for name in names]
    for path in letters:
        frame = await asyncio.to_thread(_frame_in, path, encoded)
        if frame is None:
            continue
        left = None
        if not isinstance(frame, str):
            left = without_deleted(frame, await known(connection, digests(names_in(frame))))
            if left == frame:
                continue
        await asyncio.to_thread(replace_letter, path, left, CHANGED)
        removed += 1
    if removed:
        log.info("dead_letters_of_deleted_episodes", letters=removed)
    return removed


# What is returned of a letter that is no record and holds the name of a deleted episode.
_UNREADABLE: Final = "unreadable"


def _frame_in(path: Path, names: Sequence[bytes]) -> Frame | str | None:
    try:
        payload = path.read_bytes()
    except FileNotFoundError:
        # It was replayed meanwhile.
        return None
    try:
        return decode_payload(payload)
    except Exception:
        # A letter may hold any bytes.
        return _UNREADABLE if any(name in payload for name in names) else None


def replace_letter(path: Path, left: Frame | None, why: bytes) -> None:
    """Write a letter again with what is left of it, and `why` in place of its reason; None: none.

    Raises:
        OSError: the disk fails.
    """
    reason = path.with_suffix(REASON)
    if left is None:
        path.unlink(missing_ok=True)
        reason.unlink(missing_ok=True)
    else:
        # The reason may quote the whole record.
        write_private(reason, why)
        write_private(path, encode_payload(left))
    sync(path.parent)


async def waiting(connection: AsyncConnection, root: Path) -> int:
    """Return how many records about deleted episodes are in this machine's segments."""
    records = 0
    for _, path in segment_files(root):
        frames = await asyncio.to_thread(_frames_in, path)
        deleted = await known(
            connection, {one for frame in frames for one in digests(names_in(frame))}
        )
        records += sum(without_deleted(frame, deleted) != frame for frame in frames)
    return records


def _frames_in(path: Path) -> list[Frame]:
    """Return the records in a segment; of those that cannot be read the drain makes letters."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        # Its records were stored meanwhile, or it was sealed, and is counted at the next look.
        return []
    frames = []
    for _, payload in read_frames(content):
        with suppress(msgspec.MsgspecError):
            frames.append(decode_payload(payload))
    return frames
