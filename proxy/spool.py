"""Records on disk before the reply's end leaves: append-only segments, group-committed.

The loop gathers frames; one writer thread takes all that wait, writes them at once, and one
`fdatasync` makes them durable (DESIGN §3.2). Frames that could not be written (disk full) are
cut off again, so that the segment stays readable, and whoever waits is told.

A worker holds a folder of its own under the spool's root. The segment that is being written
is `ID.open`; one that will not grow any more is `ID.seg`. The keeper reads both and deletes
the latter (`proxy.keeping.drain`).
"""

import asyncio
import fcntl
import os
import queue
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Final

import structlog

from proxy.errors import SpoolInUse
from store.files import sync
from store.ids import new_id

log = structlog.get_logger()

OPEN: Final = ".open"
SEALED: Final = ".seg"
# A segment that nothing was added to for so long is sealed, so that the keeper can delete it.
QUIET_S: Final = 5.0
# Where a commit brought so many, the next one waits a little for more: each costs a wake-up of
# the writer, which the calls themselves have to wait for.
BUSY: Final = 4
GATHER_S: Final = 0.002
Waiting = tuple[bytes, "asyncio.Future[bool]", str]
Commit = tuple[list[Waiting], asyncio.AbstractEventLoop]
OnCommit = Callable[[bool, list[str]], None]


def _nothing(_durable: bool, _marks: list[str]) -> None:
    """Nobody wants to be told."""


class Spool:
    """The segments of one worker."""

    def __init__(self, folder: Path, *, segment_bytes: int, on_commit: OnCommit = _nothing) -> None:
        """Take hold of `folder`; `on_commit` is told how each commit went, before who waits.

        Raises:
            SpoolInUse: another process holds it.
            OSError: it cannot be made or written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._segment_bytes = segment_bytes
        self._lock = hold(folder / "lock")
        for left in folder.glob(f"*{OPEN}"):
            left.rename(left.with_suffix(SEALED))
        self._on_commit = on_commit
        self._gathered: list[Waiting] = []
        self._in_commit: list[Waiting] = []
        self._busy = False
        self._queue: queue.SimpleQueue[Commit | None] = queue.SimpleQueue()
        self._segment: Path | None = None
        self._file: int | None = None
        self._size = 0
        self._thread = threading.Thread(target=self._run, name="pawl-spool", daemon=True)
        self._thread.start()

    def append(self, frame: bytes, mark: str = "") -> "asyncio.Future[bool]":
        """Take a frame; the future says whether it is on disk (False: it is not, nor will be).

        The frame is taken at once: whoever stops waiting does not take it back. `mark` is
        what `on_commit` is told of it.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bool] = loop.create_future()
        if not self._gathered and not self._in_commit:
            if self._busy:
                loop.call_later(GATHER_S, self._commit)
            else:
                # What this turn of the loop still brings goes along.
                loop.call_soon(self._commit)
        self._gathered.append((frame, future, mark))
        return future

    def _commit(self) -> None:
        if self._gathered:
            self._in_commit, self._gathered = self._gathered, []
            self._queue.put((self._in_commit, asyncio.get_running_loop()))

    def _committed(self, waiting: list[Waiting], durable: bool) -> None:
        self._in_commit = []
        self._busy = len(waiting) >= BUSY
        self._on_commit(durable, [mark for _, _, mark in waiting])
        for _, future, _ in waiting:
            if not future.done():
                future.set_result(durable)
        if self._gathered and self._busy:
            asyncio.get_running_loop().call_later(GATHER_S, self._commit)
        else:
            self._commit()

    async def flush(self) -> None:
        """Wait until all that was taken is on disk, or was given up."""
        while waiting := [*self._gathered, *self._in_commit]:
            await asyncio.wait([future for _, future, _ in waiting])

    def close(self) -> None:
        """Seal the segment, and let go of the folder. `flush` comes first."""
        self._queue.put(None)
        self._thread.join()
        self._lock.release()

    # the writer thread

    def _run(self) -> None:
        while True:
            try:
                commit = self._queue.get(timeout=QUIET_S)
            except queue.Empty:
                self._seal()
                continue
            if commit is None:
                self._seal()
                return
            waiting, loop = commit
            durable = self._write(b"".join([frame for frame, _, _ in waiting]))
            loop.call_soon_threadsafe(self._committed, waiting, durable)

    def _write(self, data: bytes) -> bool:
        before = self._size
        try:
            file = self._open_file()
            before = self._size
            view = memoryview(data)
            while view:
                view = view[os.write(file, view) :]
            os.fdatasync(file)
        except OSError as error:
            log.error("spool_write_failed", bytes=len(data), reason=str(error))
            if self._file is not None:
                os.ftruncate(self._file, before)
                # The keeper may have read what was cut off: nothing else may stand in its place.
                self._seal()
            return False
        self._size = before + len(data)
        if self._size >= self._segment_bytes:
            self._seal()
        return True

    def _open_file(self) -> int:
        if self._file is not None and os.fstat(self._file).st_nlink == 0:
            log.error("segment_removed", segment=str(self._segment), by="somebody else")
            os.close(self._file)
            self._file = None
        if self._file is None:
            segment = self.folder / f"{new_id()}{OPEN}"
            self._file = os.open(segment, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            self._segment = segment
            self._size = 0
            # The new file's name must be durable too.
            sync(self.folder)
        return self._file

    def _seal(self) -> None:
        if self._file is None or self._segment is None:
            return
        os.close(self._file)
        try:
            self._segment.rename(self._segment.with_suffix(SEALED))
        except OSError as error:
            # It was removed, or stays `.open` until its worker is gone; the next one is begun.
            log.error("segment_not_sealed", segment=str(self._segment), reason=str(error))
        self._file = self._segment = None
        self._size = 0


def take_folder(root: Path, *, segment_bytes: int, on_commit: OnCommit = _nothing) -> Spool:
    """A spool in the first numbered folder under `root` that nobody holds."""
    for number in count():
        folder = root / str(number)
        try:
            return Spool(folder, segment_bytes=segment_bytes, on_commit=on_commit)
        except SpoolInUse:
            continue
    raise AssertionError("unreachable: count() has no end")


class Lock:
    """A file that this process holds for as long as it lives, or until `release`."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def release(self) -> None:
        """Let go."""
        os.close(self._handle)


def hold(path: Path) -> Lock:
    """Lock a file.

    Raises:
        SpoolInUse: another process holds it.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise SpoolInUse(
            f"another process spools to {path.parent}: stop it, or set PAWL_SPOOL_DIR"
        ) from error
    return Lock(handle)


def is_held(path: Path) -> bool:
    """Whether a process holds the lock."""
    try:
        hold(path).release()
    except SpoolInUse:
        return True
    return False
