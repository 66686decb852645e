"""Hand records to the spool; count one that cannot be written, and leave a gap.

A `Gap` names the episodes that miss a record. It is written with the failed commit itself, into the
spool's reserve. If that fails too (the reserve is used up, or the disk gives I/O errors), the
episodes are remembered, and the gap is written as soon as the disk works. Meanwhile an outage on
disk stands for them, in case this process is killed (`proxy.spool.outages`).
"""

import asyncio
from pathlib import Path
from typing import Final

import structlog

from proxy.metrics import UNWRITTEN
from proxy.redaction import Redactor
from proxy.spool.segments import CapturedCall, Frame, Gap, encode_frame
from proxy.spool.spool import Outcome, take_folder
from store.ids import new_id
from store.records import FeedbackRecord

log = structlog.get_logger()

# Most episodes with an unwritten gap that are remembered; beyond them only the outage is on disk.
MOST_GAPS: Final = 100_000
# After a failed write the disk is tried again at this interval, even if no call comes.
RETRY_S: Final = 1.0
# Marks a frame that holds a `Gap`, which is not a client's record.
GAP: Final = "\0gap"


class Recorder:
    """Bring one worker's records to disk: each is durable, or it is dropped, counted and marked."""

    def __init__(
        self,
        root: Path,
        *,
        segment_bytes: int,
        redactor: Redactor | None = None,
    ) -> None:
        """Take a folder under `root`; with a redactor, each record goes through it before.

        Raises:
            OSError: it cannot be created or written, and that will not change by itself.
        """
        self._redactor = redactor
        self._redacting: set[asyncio.Task[None]] = set()
        self._gaps: dict[str, None] = {}
        # Those in the gap that is being written.
        self._telling: tuple[str, ...] = ()
        # Records were lost since the last outage ended; and some of whose episodes no name is left.
        self._losing = False
        self._unnamed = False
        self._retry: asyncio.TimerHandle | None = None
        self._spool = take_folder(
            root, segment_bytes=segment_bytes, on_commit=self._committed, note=self._gap_of
        )

    def take(self, record: CapturedCall) -> "asyncio.Future[bool]":
        """Take a call's record; it is written whether or not the future is awaited."""
        if self._redactor is None:
            return self._append(record, record.episode)
        durable: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        # A task of its own: who awaits the future may give up, and the record is written anyway.
        task = asyncio.create_task(self._append_redacted(self._redactor, record, durable))
        self._redacting.add(task)
        task.add_done_callback(self._redacting.discard)
        return durable

    async def _append_redacted(
        self, redactor: Redactor, record: CapturedCall, durable: "asyncio.Future[bool]"
    ) -> None:
        is_durable = False
        try:
            is_durable = await self._append(await redactor.capture(record), record.episode)
        except Exception:
            log.exception("record_not_redacted")
            self.lose(record.episode)
        finally:
            if not durable.done():
                durable.set_result(is_durable)

    def lose(self, episode: str) -> "asyncio.Future[bool]":
        """Count a record that could not be made, as if the disk had refused it."""
        self._committed("lost", [episode.encode(errors="replace").decode()])
        lost: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        lost.set_result(False)
        return lost

    async def append(self, record: Frame) -> bool:
        """Write any other record, and return whether it is durable."""
        if self._redactor is not None and isinstance(record, FeedbackRecord):
            record = self._redactor.feedback(record)
        return await self._append(record, "")

    def _append(self, record: Frame, episode: str) -> "asyncio.Future[bool]":
        try:
            frame = encode_frame(record)
        except Exception:
            # A record that cannot be encoded counts as one that the disk refused.
            log.exception("record_not_encoded", kind=type(record).__name__)
            return self.lose(episode)
        return self._spool.append(frame, episode)

    def under_way_s(self) -> float:
        """Return for how many seconds the disk has been busy with one commit."""
        return self._spool.under_way_s()

    def _gap_of(self, marks: list[str]) -> bytes:
        """Return the gap that lost frames leave, as a frame; called in the spool's thread."""
        # `_telling` does not change before the commit of its gap has ended.
        episodes = dict.fromkeys(mark for mark in marks if mark and mark != GAP)
        if GAP in marks:
            episodes |= dict.fromkeys(self._telling)
        return _gap(tuple(episodes)) if episodes else b""

    def _committed(self, outcome: Outcome, marks: list[str]) -> None:
        if GAP in marks:
            written, self._telling = self._telling, ()
            if outcome == "lost":
                self._gaps = dict.fromkeys(written) | self._gaps
        # A frame of gaps is no client's record: it is not lost, but written again later.
        lost = [mark for mark in marks if mark != GAP]
        if outcome == "durable":
            self._tell_of_gaps()
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
        """Remember the episodes of lost records, as many as there is room for."""
        for episode in filter(None, lost):
            self._losing = True
            if len(self._gaps) < MOST_GAPS:
                self._gaps[episode] = None
            elif episode not in self._gaps:
                self._unnamed = True

    def _end_outage(self) -> None:
        """End the outage once all episodes that are remembered have been told of."""
        if self._gaps or self._telling:
            return
        self._spool.end_outage(named=not self._unnamed)
        self._losing = self._unnamed = False

    def _try_again(self) -> None:
        # If no call comes, nothing else would notice that the disk works again, and an episode
        # that misses a call would pass for a complete one.
        self._retry = None
        self._tell_of_gaps()

    def _tell_of_gaps(self) -> None:
        """Write a `Gap` for the episodes that miss a record, unless one is being written."""
        if not self._gaps or self._telling:
            return
        self._telling, self._gaps = tuple(self._gaps), {}
        self._spool.append(_gap(self._telling), GAP)

    async def close(self) -> None:
        """Write what waits, and unlock the folder."""
        while self._redacting:
            await asyncio.wait(self._redacting)
        await self._spool.flush()
        self._tell_of_gaps()
        await self._spool.flush()
        # The futures' callbacks run in the loop's next turn.
        await asyncio.sleep(0)
        if self._retry is not None:
            self._retry.cancel()
        if self._gaps:
            log.error("gaps_not_told", episodes=len(self._gaps), reason="the disk refused them")
        self._spool.close()


def _gap(episodes: tuple[str, ...]) -> bytes:
    return encode_frame(Gap(id=new_id().bytes, episodes=episodes))
