"""Write records to disk by group commit, durable before a reply's end leaves.

The event loop gathers frames; one writer thread takes all waiting frames, writes them together, and
makes them durable with one `fdatasync`. A commit has at most one long frame, so that an ordinary
call does not wait for several. Every future gets a result and the thread goes on, whatever the disk
does: an error gives False at once, and so does a commit that takes longer than `PATIENCE_S`. Until
the disk answers, new frames are refused at once. Failed bytes are cut off again, so that the
segment stays readable.

A record that cannot be written is counted, and a `GapRecord` names its episode. Before any client
gets its answer, the writer thread writes the gap into a reserve, for which even a full disk has
room. If that fails too, the episodes stay in memory until their gap can be written; meanwhile a
recording outage on disk covers them, in case this process is killed.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Literal

import structlog

from proxy.metrics import UNWRITTEN
from proxy.redaction import Redactor
from proxy.spool.folders import PASSING_ERRORS, WorkerFolder, take_worker_folder
from proxy.spool.segments import CapturedCall, Frame, encode_frame
from proxy.spool.writer import SegmentWriter
from store.ids import new_id
from store.records import FeedbackRecord, GapRecord

log = structlog.get_logger()

# Size at which a segment is sealed.
SEGMENT_BYTES: Final = 8 * 2**20
# A segment that has not grown for this long is sealed, so that the ingester can delete it.
QUIET_S: Final = 5.0
# After a commit of at least `BUSY_FRAMES` frames, the next commit waits `GATHER_S` for more: each
# commit wakes the writer thread up, and calls wait for that.
BUSY_FRAMES: Final = 4
GATHER_S: Final = 0.002
# A commit has at most one frame longer than this; the others wait.
LONG_BYTES: Final = 256 * 1024
# Longest time that a commit may take before it counts as failed.
PATIENCE_S: Final = 15.0
# Longest time that `close` waits for a disk that does not answer.
CLOSE_S: Final = 5.0
WaitingFrame = tuple[bytes, "asyncio.Future[bool]", str]
Commit = tuple[list[WaitingFrame], asyncio.AbstractEventLoop]
# `noted`: the frames are lost, and a note of them is durable.
Outcome = Literal["durable", "noted", "lost"]
OnCommit = Callable[[Outcome, list[str]], None]
Note = Callable[[list[str]], bytes]


def _ignore_commit(_outcome: Outcome, _marks: list[str]) -> None:
    """Ignore the outcome of a commit."""


def _no_note(_marks: list[str]) -> bytes:
    return b""


class Spool:
    """One worker's segments, and the thread that writes them."""

    def __init__(
        self,
        folder: Path | Callable[[], WorkerFolder],
        *,
        segment_bytes: int = SEGMENT_BYTES,
        on_commit: OnCommit = _ignore_commit,
        note: Note = _no_note,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Lock a folder, and start the writer thread.

        If the disk is full or fails, the folder is locked as soon as the disk works.

        Args:
            folder: the folder, or a function that locks one.
            segment_bytes: size at which a segment is sealed.
            on_commit: called after each commit, before its futures get their result, with
                its outcome and the marks of its frames.
            note: called in the writer thread with the marks of lost frames; returns the frame to
                write in their place, or empty bytes.
            patience_s: longest time that a commit may take before it counts as failed.

        Raises:
            SpoolInUse: another process holds the folder.
            OSError: it cannot be created or written, and the error will not pass by itself.
        """
        take = folder if callable(folder) else partial(WorkerFolder, folder)
        self._on_commit = on_commit
        self._note = note
        self._patience_s = patience_s
        self._gathered: list[WaitingFrame] = []
        self._in_commit: list[WaitingFrame] = []
        self._busy = False
        # When the present commit began (loop time), and whether a timer watches it.
        self._began = 0.0
        self._watched = False
        self._stalled = False
        self._queue: queue.SimpleQueue[Commit | Callable[[], None] | None] = queue.SimpleQueue()
        self._writer = SegmentWriter(take, _take_folder(take), segment_bytes=segment_bytes)
        self._thread = threading.Thread(target=self._run, name="pawl-spool", daemon=True)
        self._thread.start()

    def append(self, frame: bytes, mark: str = "") -> "asyncio.Future[bool]":
        """Queue a frame; the future's result is whether it is durable (False: it counts as lost).

        A frame is written even if its future is cancelled. `on_commit` gets the frame's `mark`.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bool] = loop.create_future()
        if self._stalled:
            self._answer([(frame, future, mark)], "lost")
            return future
        if not self._gathered and not self._in_commit:
            if self._busy:
                loop.call_later(GATHER_S, self._commit)
            else:
                # Frames that come in the same turn of the loop join the commit.
                loop.call_soon(self._commit)
        self._gathered.append((frame, future, mark))
        return future

    def commit_under_way_s(self) -> float:
        """Return for how many seconds the disk has been busy with a commit; 0 if it is not."""
        if not self._in_commit and not self._stalled:
            return 0.0
        return asyncio.get_running_loop().time() - self._began

    def _commit(self) -> None:
        if not self._gathered:
            return
        loop = asyncio.get_running_loop()
        self._in_commit, self._gathered = _split_commit(self._gathered)
        self._began = loop.time()
        if not self._watched:
            self._watched = True
            loop.call_later(self._patience_s, self._check_commit)
        self._queue.put((self._in_commit, loop))

    def _check_commit(self) -> None:
        """If the present commit takes too long, give it up: all waiting frames count as lost."""
        self._watched = False
        if not self._in_commit:
            return
        loop = asyncio.get_running_loop()
        remaining_s = self._began + self._patience_s - loop.time()
        if remaining_s > 0:
            self._watched = True
            loop.call_later(remaining_s, self._check_commit)
            return
        waiting = [*self._in_commit, *self._gathered]
        self._in_commit, self._gathered, self._stalled = [], [], True
        log.error("spool_stalled", records=len(waiting), after_s=self._patience_s)
        self._answer(waiting, "lost")

    def _committed(self, waiting: list[WaitingFrame], outcome: Outcome) -> None:
        if self._stalled:
            # The futures got False already. Frames that reached the disk will be stored anyway.
            self._stalled = False
            log.warning("spool_answers_again", outcome=outcome)
            self._answer([], outcome)
            return
        self._in_commit = []
        self._busy = len(waiting) >= BUSY_FRAMES
        self._answer(waiting, outcome)
        if self._gathered and self._busy:
            asyncio.get_running_loop().call_later(GATHER_S, self._commit)
        else:
            self._commit()

    def _answer(self, waiting: Sequence[WaitingFrame], outcome: Outcome) -> None:
        try:
            self._on_commit(outcome, [mark for _, _, mark in waiting])
        except Exception:
            # The futures must get their result even if `on_commit` fails.
            log.exception("spool_not_counted", records=len(waiting), outcome=outcome)
        for _, future, _ in waiting:
            if not future.done():
                future.set_result(outcome == "durable")

    def end_outage(self, *, named: bool) -> None:
        """End the outage, if one lasts; `named`: gaps name every episode that lost a record."""
        self._queue.put(partial(self._writer.end_outage, named=named))

    async def flush(self) -> None:
        """Wait until every queued frame is durable or counts as lost."""
        while waiting := [*self._gathered, *self._in_commit]:
            await asyncio.wait([future for _, future, _ in waiting])

    def close(self, within_s: float = CLOSE_S) -> None:
        """Seal the segment and unlock the folder; call `flush` before.

        Wait at most `within_s` seconds for the disk; after that, only the end of this process
        unlocks the folder.
        """
        self._queue.put(None)
        self._thread.join(within_s)
        if self._thread.is_alive():
            log.error("spool_not_closed", waited_s=within_s, reason="the disk does not answer")

    # The methods below run in the writer thread.

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
            if callable(commit):
                commit()
                continue
            waiting, loop = commit
            outcome = self._write_frames(waiting)
            try:
                loop.call_soon_threadsafe(self._committed, waiting, outcome)
            except RuntimeError:
                # The loop is closed, so nothing waits for these frames any more.
                log.error("spool_result_undeliverable", records=len(waiting), outcome=outcome)

    def _write_frames(self, waiting: Sequence[WaitingFrame]) -> Outcome:
        try:
            if self._writer.append(b"".join([frame for frame, _, _ in waiting])):
                return "durable"
            note = self._note([mark for _, _, mark in waiting])
            if note and self._writer.append_to_reserve(note):
                return "noted"
        except Exception:
            # Memory may be short. This thread must go on, or no frame would get a result again.
            log.exception("spool_write_failed", records=len(waiting))
        if any(mark for _, _, mark in waiting):
            self._writer.begin_outage()
        return "lost"


def _split_commit(
    gathered: list[WaitingFrame],
) -> tuple[list[WaitingFrame], list[WaitingFrame]]:
    """Return the frames of the next commit, and those that wait for a later commit.

    Waiting frames may be written in any order: a call arrives after the record of any call that it
    depends on is durable.
    """
    lengths = [len(frame) for frame, _, _ in gathered]
    if max(lengths) <= LONG_BYTES:
        return gathered, []
    first = next(at for at, length in enumerate(lengths) if length > LONG_BYTES)
    now: list[WaitingFrame] = []
    later: list[WaitingFrame] = []
    for at, waiting in enumerate(gathered):
        (now if at == first or lengths[at] <= LONG_BYTES else later).append(waiting)
    return now, later


def _take_folder(take: Callable[[], WorkerFolder]) -> WorkerFolder | None:
    try:
        return take()
    except OSError as error:
        if error.errno not in PASSING_ERRORS:
            raise
        log.error("spool_not_taken", reason=str(error), until="the disk works")
        return None


# Most episodes whose gap is not written yet; further ones are covered by the outage alone.
MOST_GAPS: Final = 100_000
# After a failed write the disk is tried again at this interval, even if no call comes.
RETRY_S: Final = 1.0
# The mark of a frame with a `GapRecord`, which is not a client's record.
GAP_MARK: Final = "\0gap"


class Recorder:
    """Write one worker's records; count those that cannot be written, and note them by gaps."""

    def __init__(
        self,
        root: Path,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        redactor: Redactor | None = None,
    ) -> None:
        """Lock a folder under `root`; a redactor redacts each record before it is written.

        Raises:
            OSError: the folder cannot be created or written, and the error will not pass by itself.
        """
        self._redactor = redactor
        self._redacting: set[asyncio.Task[None]] = set()
        self._gaps: dict[str, None] = {}
        # The episodes of the gap that is being written.
        self._writing_gap: tuple[str, ...] = ()
        # Whether records were lost since the last outage ended, and whether the episodes of some of
        # them are not remembered.
        self._losing = False
        self._unnamed = False
        self._retry: asyncio.TimerHandle | None = None
        self._spool = Spool(
            partial(take_worker_folder, root),
            segment_bytes=segment_bytes,
            on_commit=self._committed,
            note=self._gap_frame_for,
        )

    def queue_call(self, record: CapturedCall) -> "asyncio.Future[bool]":
        """Queue a call's record; the future's result is whether it is durable.

        The record is written whether or not the future is awaited.
        """
        if self._redactor is None:
            return self._append(record, record.episode)
        durable: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        # A separate task, so that the record is written even if the caller stops waiting.
        task = asyncio.create_task(self._append_redacted(self._redactor, record, durable))
        self._redacting.add(task)
        task.add_done_callback(self._redacting.discard)
        return durable

    async def _append_redacted(
        self, redactor: Redactor, record: CapturedCall, durable: "asyncio.Future[bool]"
    ) -> None:
        is_durable = False
        try:
            is_durable = await self._append(await redactor.redact_captured(record), record.episode)
        except Exception:
            log.exception("record_not_redacted")
            self.count_lost(record.episode)
        finally:
            if not durable.done():
                durable.set_result(is_durable)

    def count_lost(self, episode: str) -> "asyncio.Future[bool]":
        """Count a record that could not be made, as if the disk had refused it."""
        self._committed("lost", [episode.encode(errors="replace").decode()])
        lost: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        lost.set_result(False)
        return lost

    async def append(self, record: Frame) -> bool:
        """Write a feedback record; return whether it is durable."""
        if self._redactor is not None and isinstance(record, FeedbackRecord):
            record = self._redactor.redact_feedback(record)
        return await self._append(record, "")

    def _append(self, record: Frame, episode: str) -> "asyncio.Future[bool]":
        try:
            frame = encode_frame(record)
        except Exception:
            # A record that cannot be encoded counts as refused by the disk.
            log.exception("record_not_encoded", kind=type(record).__name__)
            return self.count_lost(episode)
        return self._spool.append(frame, episode)

    def commit_under_way_s(self) -> float:
        """Return for how many seconds the disk has been busy with a commit; 0 if it is not."""
        return self._spool.commit_under_way_s()

    def _gap_frame_for(self, marks: list[str]) -> bytes:
        """Return a gap's frame for the episodes of lost frames, or empty bytes if none has one."""
        # `_writing_gap` does not change before the commit of its gap has ended.
        episodes = dict.fromkeys(mark for mark in marks if mark and mark != GAP_MARK)
        if GAP_MARK in marks:
            episodes |= dict.fromkeys(self._writing_gap)
        return _gap_frame(tuple(episodes)) if episodes else b""

    def _committed(self, outcome: Outcome, marks: list[str]) -> None:
        if GAP_MARK in marks:
            written, self._writing_gap = self._writing_gap, ()
            if outcome == "lost":
                self._gaps = dict.fromkeys(written) | self._gaps
        # A gap is no client's record: it does not count as lost, but is written again later.
        lost = [mark for mark in marks if mark != GAP_MARK]
        if outcome == "durable":
            self._write_gaps()
        if outcome != "lost" and self._losing:
            self._end_outage()
        if outcome == "durable":
            return
        if lost:
            UNWRITTEN.inc(len(lost))
            log.error("records_dropped", records=len(lost), reason="not written")
        if outcome == "lost":
            self._remember(lost)
        if self._gaps and self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._try_again)

    def _remember(self, lost: list[str]) -> None:
        """Remember the episodes of lost records, at most `MOST_GAPS`."""
        for episode in filter(None, lost):
            self._losing = True
            if len(self._gaps) < MOST_GAPS:
                self._gaps[episode] = None
            elif episode not in self._gaps:
                self._unnamed = True

    def _end_outage(self) -> None:
        """End the outage once the gaps of all known episodes that lost records are written."""
        if self._gaps or self._writing_gap:
            return
        self._spool.end_outage(named=not self._unnamed)
        self._losing = self._unnamed = False

    def _try_again(self) -> None:
        # If no call comes, nothing else would notice that the disk works again, and an episode
        # that misses a call would pass for a complete one.
        self._retry = None
        self._write_gaps()

    def _write_gaps(self) -> None:
        """Write a `GapRecord` of the episodes that lost records, unless one is being written."""
        if not self._gaps or self._writing_gap:
            return
        self._writing_gap, self._gaps = tuple(self._gaps), {}
        self._spool.append(_gap_frame(self._writing_gap), GAP_MARK)

    async def close(self) -> None:
        """Write all waiting records, and unlock the folder."""
        while self._redacting:
            await asyncio.wait(self._redacting)
        await self._spool.flush()
        self._write_gaps()
        await self._spool.flush()
        # The futures' callbacks run in the loop's next turn.
        await asyncio.sleep(0)
        if self._retry is not None:
            self._retry.cancel()
        if self._gaps:
            log.error("gaps_not_written", episodes=len(self._gaps), reason="the disk refused them")
        self._spool.close()


def _gap_frame(episodes: tuple[str, ...]) -> bytes:
    return encode_frame(GapRecord(id=new_id(), episodes=episodes))
