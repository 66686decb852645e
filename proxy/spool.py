"""Records on disk before the reply's end leaves: append-only segments, group-committed.

The loop gathers frames; one writer thread takes all that wait, writes them at once, and one
`fdatasync` makes them durable. Frames that could not be written (disk full) are cut off again, so
that the segment stays readable, and whoever waits is told.

A worker holds a folder of its own under the spool's root. The segment that is being written
is `ID_MARK.open`; one that will not grow any more is `ID_MARK.seg`. The keeper reads both and
deletes the latter (`proxy.keeping.drain`).

Whatever the disk does, who waits gets an answer, and the thread goes on: an error is an answer
at once; a disk that says nothing for `PATIENCE_S` is one too, and until it has answered, what
comes is refused at once and not gathered.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from proxy.spooling.folders import PASSING, Home, take_home
from proxy.spooling.segment_writer import SegmentWriter

log = structlog.get_logger()

# A segment that nothing was added to for so long is sealed, so that the keeper can delete it.
QUIET_S: Final = 5.0
# Where a commit brought so many, the next one waits a little for more: each costs a wake-up of
# the writer, which the calls themselves have to wait for.
BUSY: Final = 4
GATHER_S: Final = 0.002
# So long a disk may take for one commit before those who wait are told that it failed.
PATIENCE_S: Final = 15.0
# So long the end of a worker waits for a disk that does not answer.
CLOSE_S: Final = 5.0
Waiting = tuple[bytes, "asyncio.Future[bool]", str]
Commit = tuple[list[Waiting], asyncio.AbstractEventLoop]
OnCommit = Callable[[bool, list[str]], None]


def _nothing(_durable: bool, _marks: list[str]) -> None:
    """Nobody wants to be told."""


class Spool:
    """The segments of one worker."""

    def __init__(
        self,
        folder: Path | Callable[[], Home],
        *,
        segment_bytes: int,
        on_commit: OnCommit = _nothing,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Take hold of `folder`; `on_commit` is told how each commit went, before who waits.

        Where the disk is full or fails, the folder is taken as soon as it lets us.

        Raises:
            SpoolInUse: another process holds it.
            OSError: it cannot be made or written, and that will not change by itself.
        """
        take = folder if callable(folder) else partial(Home, folder)
        self._on_commit = on_commit
        self._patience_s = patience_s
        self._gathered: list[Waiting] = []
        self._in_commit: list[Waiting] = []
        self._busy = False
        # Since when the present commit is under way, and whether a timer looks after it.
        self._began = 0.0
        self._watched = False
        self._stalled = False
        self._queue: queue.SimpleQueue[Commit | None] = queue.SimpleQueue()
        self._writer = SegmentWriter(take, _taken(take), segment_bytes=segment_bytes)
        self._thread = threading.Thread(target=self._run, name="pawl-spool", daemon=True)
        self._thread.start()

    def append(self, frame: bytes, mark: str = "") -> "asyncio.Future[bool]":
        """Take a frame; the future says whether it is on disk (False: it counts as lost).

        The frame is taken at once: whoever stops waiting does not take it back. `mark` is
        what `on_commit` is told of it.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bool] = loop.create_future()
        if self._stalled:
            self._answer([(frame, future, mark)], False)
            return future
        if not self._gathered and not self._in_commit:
            if self._busy:
                loop.call_later(GATHER_S, self._commit)
            else:
                # What this turn of the loop still brings goes along.
                loop.call_soon(self._commit)
        self._gathered.append((frame, future, mark))
        return future

    def under_way_s(self) -> float:
        """Return for how many seconds the disk has been busy with the present commit."""
        if not self._in_commit and not self._stalled:
            return 0.0
        return asyncio.get_running_loop().time() - self._began

    def _commit(self) -> None:
        if not self._gathered:
            return
        loop = asyncio.get_running_loop()
        self._in_commit, self._gathered = self._gathered, []
        self._began = loop.time()
        if not self._watched:
            self._watched = True
            loop.call_later(self._patience_s, self._look)
        self._queue.put((self._in_commit, loop))

    def _look(self) -> None:
        """Give a commit up that takes too long; whoever waits, or comes meanwhile, is told."""
        self._watched = False
        if not self._in_commit:
            return
        loop = asyncio.get_running_loop()
        left = self._began + self._patience_s - loop.time()
        if left > 0:
            self._watched = True
            loop.call_later(left, self._look)
            return
        waiting = [*self._in_commit, *self._gathered]
        self._in_commit, self._gathered, self._stalled = [], [], True
        log.error("spool_stalled", records=len(waiting), after_s=self._patience_s)
        self._answer(waiting, False)

    def _committed(self, waiting: list[Waiting], durable: bool) -> None:
        if self._stalled:
            # These were told that they are lost. What is on disk of them is stored all the same.
            self._stalled = False
            log.warning("spool_answers_again", durable=durable)
            self._answer([], durable)
            return
        self._in_commit = []
        self._busy = len(waiting) >= BUSY
        self._answer(waiting, durable)
        if self._gathered and self._busy:
            asyncio.get_running_loop().call_later(GATHER_S, self._commit)
        else:
            self._commit()

    def _answer(self, waiting: Sequence[Waiting], durable: bool) -> None:
        try:
            self._on_commit(durable, [mark for _, _, mark in waiting])
        except Exception:
            # Who waits has to be told, whatever those do who count.
            log.exception("spool_not_counted", records=len(waiting), durable=durable)
        for _, future, _ in waiting:
            if not future.done():
                future.set_result(durable)

    async def flush(self) -> None:
        """Wait until all that was taken is on disk, or was given up."""
        while waiting := [*self._gathered, *self._in_commit]:
            await asyncio.wait([future for _, future, _ in waiting])

    def close(self, within_s: float = CLOSE_S) -> None:
        """Seal the segment, and let go of the folder. `flush` comes first.

        A disk that does not answer is not waited for: the folder is free once this process ends.
        """
        self._queue.put(None)
        self._thread.join(within_s)
        if self._thread.is_alive():
            log.error("spool_not_closed", waited_s=within_s, reason="the disk does not answer")

    # the writer thread

    def _run(self) -> None:
        while True:
            try:
                commit = self._queue.get(timeout=QUIET_S)
            except queue.Empty:
                self._writer.seal()
                continue
            if commit is None:
                self._writer.release()
                return
            waiting, loop = commit
            durable = self._written(waiting)
            try:
                loop.call_soon_threadsafe(self._committed, waiting, durable)
            except RuntimeError:
                # The loop is closed, and with it all that waited.
                log.error("spool_answers_nobody", records=len(waiting), durable=durable)

    def _written(self, waiting: Sequence[Waiting]) -> bool:
        try:
            return self._writer.append(b"".join([frame for frame, _, _ in waiting]))
        except Exception:
            # Memory is short, say: without this thread nothing would ever be answered again.
            log.exception("spool_write_failed", records=len(waiting))
            return False


def _taken(take: Callable[[], Home]) -> Home | None:
    try:
        return take()
    except OSError as error:
        if error.errno not in PASSING:
            raise
        log.error("spool_not_taken", reason=str(error), until="the disk works")
        return None


def take_folder(root: Path, *, segment_bytes: int, on_commit: OnCommit = _nothing) -> Spool:
    """Return a spool in the first numbered folder under `root` that nobody holds."""
    return Spool(lambda: take_home(root), segment_bytes=segment_bytes, on_commit=on_commit)
