"""Remove what is older than `PAWL_KEEP_DAYS` says: in the database, and this machine's letters."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from uuid import UUID

import msgspec
import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.calls.capture import CapturedCall, Frame, Gap
from proxy.ingester.removing.deleted import letters_of, names_in, replace_letter
from proxy.metrics import OUTDATED
from proxy.spool.segments import decode_payload
from store.connection.availability import is_unavailable
from store.connection.engine import database_time
from store.ids import time_of
from store.records import CallRecord
from store.retaining.outdated import Removed, remove_some
from store.retaining.periods import Cuts, Periods, is_before
from store.retaining.tenant_cuts import NOWHERE
from store.tenants import tenant_of

log = structlog.get_logger()

LOOK_S: Final = 600.0
FIRST_S: Final = 10.0
# Pause between two steps, so that records are stored meanwhile.
STEP_S: Final = 0.05
OLD: Final = b"refused; what was about outdated episodes was removed from it"


async def remove_outdated(
    root: Path, connect: Callable[[], AsyncEngine | None], periods: Periods
) -> None:
    """Remove what is older than its tenant's days, every `LOOK_S` seconds, until cancelled."""
    pause = FIRST_S
    while True:
        await asyncio.sleep(pause)
        pause = LOOK_S
        try:
            if (engine := connect()) is None:
                continue
            # A clock that is set ahead must not remove what is new: two have to agree.
            today = min(datetime.now(UTC), await database_time(engine)).date()
            await remove_all(engine, periods.cuts(today))
            await _remove_letters(root, periods.cuts(today))
        except Exception as error:
            # This task must not end: what is outdated is looked for again in any case.
            note = log.warning if is_unavailable(error) else log.exception
            note("outdated_kept", reason=type(error).__name__)


async def remove_all(engine: AsyncEngine, cuts: Cuts) -> None:
    """Remove what is outdated, step by step, and count it."""
    after = NOWHERE
    while (removed := await remove_some(engine, cuts, after)) is not None:
        after = removed.last
        _count(removed)
        await asyncio.sleep(STEP_S)


async def _remove_letters(root: Path, cuts: Cuts) -> None:
    letters = await asyncio.to_thread(remove_old_letters, root, cuts)
    if letters:
        OUTDATED.labels("letters").inc(letters)
        log.info("outdated_letters_removed", letters=letters)


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


def remove_old_letters(root: Path, cuts: Cuts) -> int:
    """Remove what is outdated from this machine's dead letters; return how many changed.

    One that the disk does not give or remove is logged, and tried again at the next look.
    """
    removed = 0
    for path in letters_of(root):
        try:
            removed += _remove_from(path, cuts)
        except FileNotFoundError:
            # It was replayed meanwhile.
            continue
        except OSError as error:
            log.error("letter_not_removed", letter=path.name, reason=str(error))
    return removed


def _remove_from(path: Path, cuts: Cuts) -> bool:
    """Remove a letter if it is outdated, or what is outdated in it; return whether any was."""
    payload = path.read_bytes()
    try:
        frame = decode_payload(payload)
    except Exception:
        # A letter may hold any bytes.
        made = datetime.fromtimestamp(path.stat().st_mtime, UTC).date()
        if outdated := cuts.outdated(made, payload):
            replace_letter(path, None, OLD)
        return outdated
    made = _made_at(frame).date()
    # What names nothing is the default tenant's.
    names = [name for _, name in names_in(frame)] or [""]
    kept = [name for name in names if not is_before(made, cuts.before(tenant_of(name)))]
    if len(kept) == len(names):
        return False
    left = None
    if kept and isinstance(frame, Gap):
        left = msgspec.structs.replace(frame, episodes=tuple(kept))
    replace_letter(path, left, OLD)
    return True


def _made_at(frame: Frame) -> datetime:
    """Return when a record was made."""
    if isinstance(frame, CapturedCall | Gap):
        return time_of(UUID(bytes=frame.id))
    return time_of(frame.id) if isinstance(frame, CallRecord) else frame.at
