"""Records on disk before the reply's end leaves: append-only segments, group-committed.

One writer thread takes all frames that wait, writes them at once, and one `fdatasync`
makes all of them durable (DESIGN §3.2). A frame that could not be written (disk full) is
cut off again, so that the segment stays readable, and its caller is told.
"""

import asyncio
import fcntl
import os
import queue
import threading
from pathlib import Path
from typing import Final

from proxy.errors import SpoolInUse
from proxy.segments import encode_frame
from store.files import sync
from store.ids import new_id
from store.records import SpoolRecord

SUFFIX: Final = ".seg"
Waiting = tuple[bytes, "asyncio.Future[None]"]


class Spool:
    """The directory of segments of one proxy process."""

    def __init__(self, folder: Path, *, segment_bytes: int) -> None:
        """Take hold of `folder`.

        Raises:
            SpoolInUse: another process holds it.
            OSError: it cannot be made or written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._segment_bytes = segment_bytes
        self._lock = _hold(folder / "lock")
        self._queue: queue.SimpleQueue[Waiting | None] = queue.SimpleQueue()
        self._state = threading.Lock()
        self._segment: Path | None = None
        self._file: int | None = None
        self._size = 0
        self._thread = threading.Thread(target=self._run, name="pawl-spool", daemon=True)
        self._thread.start()

    async def append(self, record: SpoolRecord) -> None:
        """Return once `record` is on disk.

        Raises:
            OSError: it is not, and will not be.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.put((encode_frame(record), future))
        await future

    def segments(self) -> list[Path]:
        """All segments, oldest first, the one being written last."""
        return sorted(self.folder.glob(f"*{SUFFIX}"))

    @property
    def active(self) -> Path | None:
        """The segment being written, if any."""
        with self._state:
            return self._segment

    def durable_size(self, segment: Path) -> int:
        """How many bytes of `segment` may be read: whole frames, synced."""
        with self._state:
            if segment == self._segment:
                return self._size
        return segment.stat().st_size

    def close_segment(self, segment: Path) -> None:
        """Write no more to `segment`; the next record begins a new one."""
        with self._state:
            if segment == self._segment and self._file is not None:
                os.close(self._file)
                self._file = self._segment = None
                self._size = 0

    def close(self) -> None:
        """Write what waits, and let go of the directory."""
        self._queue.put(None)
        self._thread.join()
        if self._segment is not None:
            self.close_segment(self._segment)
        os.close(self._lock)

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            waiting = [first]
            ending = False
            while not self._queue.empty():
                more = self._queue.get()
                if more is None:
                    ending = True
                    break
                waiting.append(more)
            self._commit(waiting)
            if ending:
                return

    def _commit(self, waiting: list[Waiting]) -> None:
        data = b"".join(frame for frame, _ in waiting)
        error: OSError | None = None
        try:
            with self._state:
                self._write(data)
        except OSError as failure:
            error = failure
        # One wake-up of the loop for all that were waiting.
        futures = [future for _, future in waiting]
        futures[0].get_loop().call_soon_threadsafe(_resolve, futures, error)

    def _write(self, data: bytes) -> None:
        file = self._open_file()
        before = self._size
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(file, view) :]
            os.fdatasync(file)
        except OSError:
            os.ftruncate(file, before)
            raise
        self._size = before + len(data)
        if self._size >= self._segment_bytes:
            os.close(file)
            self._file = self._segment = None
            self._size = 0

    def _open_file(self) -> int:
        if self._file is None:
            segment = self.folder / f"{new_id()}{SUFFIX}"
            self._file = os.open(segment, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            self._segment = segment
            self._size = 0
            # The new file's name must be durable too.
            sync(self.folder)
        return self._file


def _resolve(futures: "list[asyncio.Future[None]]", error: OSError | None) -> None:
    for future in futures:
        if future.done():
            continue
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


def _hold(path: Path) -> int:
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise SpoolInUse(
            f"another process spools to {path.parent}: stop it, or set PAWL_SPOOL_DIR"
        ) from error
    return handle
